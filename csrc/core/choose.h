// Which variant runs a problem.
#pragma once

#include "prepared.h"

namespace tk {

enum class Chosen : int32_t { Predicted = 0, Measured = 1, Given = 2 };  // as tk_choice.pinned

struct Choice {
  uint32_t variant = 0;  // in the pack
  Chosen how = Chosen::Predicted;
  int64_t cost = -1;  // picoseconds, of a predicted choice
  Prepared prepared;  // not yet resolved
};

// Throws TK_INVALID_ARGUMENT for a config that does not exist or does not fit, TK_VARIANT_NOT_FOUND when nothing fits.
Choice choose(Problem& problem);

// Whether something fits, whatever config the call names.
bool can_run(Problem& problem);

// What became of a candidate: its cost, or why it cannot run (a text that lives as long as the process).
struct Candidate {
  uint32_t variant;
  int64_t cost;
  const char* failed;  // completes "this variant needs …"; nullptr: it can run
};

// All candidates, in the pack's order.
std::vector<Candidate> candidates(Problem& problem);

// Remembers a measured choice; config -1 forgets it. Throws as choose().
void pin(Problem& problem, int32_t config);

}  // namespace tk
