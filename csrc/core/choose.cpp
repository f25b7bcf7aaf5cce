#include "choose.h"

#include <algorithm>
#include <optional>
#include <set>

namespace tk {
namespace {

constexpr char kDeterministicOff[] = "deterministic mode off: the order of its additions is not fixed";
constexpr char kStrictOff[] = "strict mode off: it is a general fallback";
constexpr char kSharedMemory[] = "more shared memory than this GPU has";
constexpr char kWithin64Bits[] = "sizes whose products stay within 64 bits";

const format::Variant& variant_of(const Problem& problem, uint32_t number) {
  return problem.pack.row<format::Variant>(number);
}

std::span<const uint32_t> numbers(const Problem& problem) {
  return problem.bucket ? problem.pack.candidates(*problem.bucket) : std::span<const uint32_t>{};
}

const char* failed_mode(const Problem& problem, const format::Variant& variant) {
  const uint32_t mode = problem.call.mode;
  if ((mode & TK_MODE_DETERMINISTIC) && (variant.flags & format::kNonDeterministic)) return kDeterministicOff;
  if ((mode & TK_MODE_STRICT) && (variant.flags & format::kGeneral)) return kStrictOff;
  return nullptr;
}

const char* failed_constraint(const Problem& problem, format::Range constraints) {
  for (const auto& constraint : problem.pack.rows<format::Constraint>(constraints)) {
    int64_t holds = 0;
    if (!evaluate(problem.pack.code(constraint.holds), problem.scope(), holds) || !holds)
      return problem.pack.string(constraint.message);
  }
  return nullptr;
}

const char* failed_launch(const Problem& problem, const format::Variant& variant) {
  for (const auto& launch : problem.pack.rows<format::Launch>(variant.launches))
    if (launch.shared > problem.device.field(DeviceField::SharedOptin)) return kSharedMemory;
  return nullptr;
}

// The cost may read the variant's locals.
const char* predict(Problem& problem, const format::Variant& variant, int64_t& cost) {
  if (!problem.evaluate_locals(variant.locals, problem.op.locals.count)) return kWithin64Bits;
  if (!evaluate(problem.pack.code(variant.cost), problem.scope(), cost)) return kWithin64Bits;
  cost = std::max<int64_t>(cost, 0);
  return nullptr;
}

// Everything but the recipes, which prepare() looks at, of one variant after the other: those of a kernel that follow
// each other often share a list of constraints.
class Judge {
 public:
  explicit Judge(Problem& problem) : problem_(problem) {}

  Candidate operator()(uint32_t number) {
    const format::Variant& variant = variant_of(problem_, number);
    Candidate candidate{number, -1, failed_mode(problem_, variant)};
    if (!candidate.failed) candidate.failed = look_at(variant.constraints);
    if (!candidate.failed) candidate.failed = failed_launch(problem_, variant);
    if (!candidate.failed) candidate.failed = predict(problem_, variant, candidate.cost);
    return candidate;
  }

 private:
  const char* look_at(format::Range constraints) {
    if (constraints.first != last_.first || constraints.count != last_.count) {
      failed_ = failed_constraint(problem_, constraints);
      last_ = constraints;
    }
    return failed_;
  }

  Problem& problem_;
  format::Range last_{};  // nothing: an empty list, which holds
  const char* failed_ = nullptr;
};

// --- Messages ---

std::string name_of(const Problem& problem, const Candidate& candidate) {
  const format::Variant& variant = variant_of(problem, candidate.variant);
  return text(problem.pack.string(variant.kernel), " ", problem.config_name(variant.config));
}

// What is missing, the most frequent reason first, each with a candidate that has it.
std::string reasons(const Problem& problem, const std::vector<Candidate>& candidates) {
  struct Row {
    std::string reason;
    const Candidate* example;
    size_t count;
  };
  std::vector<Row> rows;
  for (const Candidate& candidate : candidates) {
    const auto same = [&](const Row& row) { return row.reason == candidate.failed; };
    const auto row = std::find_if(rows.begin(), rows.end(), same);
    if (row != rows.end()) {
      row->count++;
    } else {
      rows.push_back({candidate.failed, &candidate, 1});
    }
  }
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.count > b.count; });
  std::string out;
  for (const Row& row : rows) {
    out += text(out.empty() ? "" : "; ", row.count, row.count == 1 ? " variant (" : " variants (like ",
                name_of(problem, *row.example), row.count == 1 ? ") needs " : ") need ", row.reason);
  }
  return out;
}

std::string advice_for(const Problem& problem) {
  return advice(problem.op_name(), problem.pack.is_own(), static_cast<uint32_t>(problem.device.arch()));
}

[[noreturn]] void fail_nothing_fits(const Problem& problem, const std::vector<Candidate>& candidates) {
  if (candidates.empty())
    fail(TK_VARIANT_NOT_FOUND, "no kernel was compiled for ", problem.text(), " on sm_", problem.device.arch(),
         " (key ", problem.key, " of ", problem.pack.path(), "); ", advice_for(problem));
  fail(TK_VARIANT_NOT_FOUND, "none of the ", candidates.size(), " variants for ", problem.text(),
       " can run: ", reasons(problem, candidates), "; ", advice_for(problem));
}

[[noreturn]] void fail_config_missing(const Problem& problem, uint32_t config) {
  const uint32_t count = problem.op.configs.count;
  if (config >= count)
    fail(TK_INVALID_ARGUMENT, problem.op_name(), " has no config ", config, "; it has ", count,
         count ? text(", from 0 to ", count - 1) : "");
  std::set<uint32_t> compiled;
  for (const uint32_t number : numbers(problem)) compiled.insert(variant_of(problem, number).config);
  std::string others;
  for (const uint32_t other : compiled)
    others += text(others.empty() ? "" : ", ", other, " (", problem.config_name(other), ")");
  if (others.empty()) fail_nothing_fits(problem, {});
  fail(TK_INVALID_ARGUMENT, "config ", config, " (", problem.config_name(config), ") was not compiled for ",
       problem.text(), "; these were: ", others);
}

// --- Choosing ---

// The variants of a config: of one kernel, told apart by their constraints.
std::vector<uint32_t> variants_with(const Problem& problem, uint32_t config) {
  std::vector<uint32_t> found;
  for (const uint32_t number : numbers(problem))
    if (variant_of(problem, number).config == config) found.push_back(number);
  return found;
}

// The cheapest of `among` that can run; nullopt, and in `failed` why, when none can. Of the variants of a config the
// first is preferred, whatever is predicted: it asks for more, and that is what it is for.
std::optional<Choice> choose_cheapest(Problem& problem, std::span<const uint32_t> among, Chosen how,
                                      std::vector<Candidate>& failed) {
  std::vector<Candidate> ranked;
  std::vector<int64_t> least(problem.op.configs.count, 0);
  Judge judge(problem);
  for (const uint32_t number : among) {
    Candidate candidate = judge(number);
    if (!candidate.failed) {
      int64_t& cost = least[variant_of(problem, number).config];
      cost = candidate.cost = std::max(candidate.cost, cost);
    }
    (candidate.failed ? failed : ranked).push_back(candidate);
  }
  std::sort(ranked.begin(), ranked.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(a.cost, a.variant) < std::pair(b.cost, b.variant);
  });
  for (Candidate& candidate : ranked) {
    Choice choice;
    choice.variant = candidate.variant;
    choice.how = how;
    choice.cost = how == Chosen::Predicted ? candidate.cost : -1;
    candidate.failed = prepare(problem, variant_of(problem, candidate.variant), choice.prepared);
    if (!candidate.failed) return choice;
    failed.push_back(candidate);
  }
  return std::nullopt;
}

Choice choose_predicted(Problem& problem) {
  std::vector<Candidate> failed;
  auto choice = choose_cheapest(problem, numbers(problem), Chosen::Predicted, failed);
  if (!choice) fail_nothing_fits(problem, failed);
  return *std::move(choice);
}

// A config given by number must fit, or the caller would get another one without knowing.
Choice choose_given(Problem& problem, uint32_t config) {
  const std::vector<uint32_t> among = variants_with(problem, config);
  if (among.empty()) fail_config_missing(problem, config);
  std::vector<Candidate> failed;
  if (auto choice = choose_cheapest(problem, among, Chosen::Given, failed)) return *std::move(choice);
  std::string needs;
  for (const Candidate& candidate : failed)
    if (needs.find(candidate.failed) == std::string::npos)
      needs += text(needs.empty() ? "" : "; or ", candidate.failed);
  std::string instead;
  try {
    const Choice other = choose_predicted(problem);
    instead = text("; ", problem.config_name(variant_of(problem, other.variant).config), " would run");
  } catch (const Error&) {
    instead = "; no other config would run either";
  }
  fail(TK_INVALID_ARGUMENT, "config ", config, " (", problem.config_name(config), ") cannot run ", problem.text(),
       ": it needs ", needs, instead);
}

// The config measured for exactly this size: the user's, else the pack's.
std::optional<uint32_t> measured_config(const Problem& problem) {
  const PinKey key = problem.pin_key();
  if (const auto config = runtime().registry.pinned(key)) return config;
  const auto pins = problem.pack.rows<format::Pin>(problem.op.pins);
  format::Pin wanted{};
  wanted.key = problem.key;
  std::copy_n(std::get<2>(key).begin(), std::size(wanted.dims), wanted.dims);
  const auto at = std::lower_bound(pins.begin(), pins.end(), wanted, PinOrder{});
  if (at == pins.end() || PinOrder{}(wanted, *at)) return std::nullopt;
  return at->config;
}

// A measured config that does not fit this time (another alignment, another mode) leaves the choice to the prediction.
// In batch-invariant mode none counts: it was measured for one number of rows, and the choice must not depend on that.
bool choose_measured(Problem& problem, Choice& choice) {
  if (problem.call.mode & TK_MODE_BATCH_INVARIANT) return false;
  const auto config = measured_config(problem);
  if (!config) return false;
  std::vector<Candidate> failed;
  auto found = choose_cheapest(problem, variants_with(problem, *config), Chosen::Measured, failed);
  if (found) choice = *std::move(found);
  return found.has_value();
}

}  // namespace

Choice choose(Problem& problem) {
  if (problem.call.config < -1) fail(TK_INVALID_ARGUMENT, "config is ", problem.call.config, "; -1 means to choose");
  if (problem.call.config >= 0) return choose_given(problem, static_cast<uint32_t>(problem.call.config));
  Choice choice;
  if (choose_measured(problem, choice)) return choice;
  return choose_predicted(problem);
}

bool can_run(Problem& problem) {
  std::vector<Candidate> failed;
  return choose_cheapest(problem, numbers(problem), Chosen::Predicted, failed).has_value();
}

std::vector<Candidate> candidates(Problem& problem) {
  std::vector<Candidate> rows;
  Judge judge(problem);
  for (const uint32_t number : numbers(problem)) {
    Candidate candidate = judge(number);
    Prepared prepared;
    if (!candidate.failed) candidate.failed = prepare(problem, variant_of(problem, number), prepared);
    if (candidate.failed) candidate.cost = -1;
    rows.push_back(candidate);
  }
  return rows;
}

void pin(Problem& problem, int32_t config) {
  if (config < -1) fail(TK_INVALID_ARGUMENT, "config is ", config, "; -1 forgets the measured one");
  if (config >= 0) choose_given(problem, static_cast<uint32_t>(config));
  runtime().registry.pin(problem.pin_key(), config < 0 ? std::nullopt : std::optional(static_cast<uint32_t>(config)));
}

}  // namespace tk
