// The part of the CUDA driver's ABI that the core uses, declared here so that nothing of CUDA is needed to build it.
// Names and numbers are those of the driver API's documentation; none of them has ever changed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tk::cu {

using Result = int;
using Device = int;
using DevicePtr = unsigned long long;
using Context = struct ContextOpaque*;
using Module = struct ModuleOpaque*;
using Function = struct FunctionOpaque*;
using Stream = struct StreamOpaque*;
using Graph = struct GraphOpaque*;
using GraphNode = struct GraphNodeOpaque*;
using UserObject = struct UserObjectOpaque*;
using HostFunction = void(void*);

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kNoBinaryForGpu = 209;
inline constexpr Result kNotFound = 500;

enum class DeviceAttribute : int {
  MultiprocessorCount = 16,
  L2CacheSize = 38,
  ComputeCapabilityMajor = 75,
  ComputeCapabilityMinor = 76,
  MaxSharedMemoryPerBlockOptin = 97,
};

enum class FunctionAttribute : int {
  SharedSizeBytes = 1,
  MaxDynamicSharedSizeBytes = 8,
  NonPortableClusterSizeAllowed = 14,
};

enum class JitOption : int { ErrorLogBuffer = 5, ErrorLogBufferSizeBytes = 6 };

enum class CaptureStatus : int { None = 0, Active = 1, Invalidated = 2 };
enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kUserObjectNoDestructorSync = 1;
inline constexpr int kClusterPolicySpread = 1;

enum class LaunchAttributeId : int {
  Cooperative = 2,
  ClusterDimension = 4,
  ClusterSchedulingPolicyPreference = 5,
  ProgrammaticStreamSerialization = 6,
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  union {
    char reserve[64];
    int flag;  // of all but ClusterDimension
    unsigned cluster[3];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned n_attributes;
};
static_assert(sizeof(LaunchConfig) == 56);

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace tk::cu
