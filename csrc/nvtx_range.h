// NVTX ranges in C++ and CUDA host code: ELDR_NVTX_RANGE("accumulate", tokens) spans its scope, in the domain
// `eldr` that eldr/tracing.py uses. Compiled out unless ELDR_WITH_NVTX is defined; header-only (nvtx3), so nothing
// is linked, and without a profiler a range costs one branch.
#pragma once

#ifdef ELDR_WITH_NVTX
#include <cstdint>
#include <nvtx3/nvtx3.hpp>

namespace eldr {
struct nvtx_domain {
    static constexpr char const* name{"eldr"};
};
using nvtx_range = nvtx3::scoped_range_in<nvtx_domain>;

// The name is registered with the profiler once per site.
#define ELDR_NVTX_RANGE(range_name, number)                                             \
    static ::nvtx3::registered_string_in<::eldr::nvtx_domain> const eldr_nvtx_name_{range_name}; \
    ::eldr::nvtx_range const eldr_nvtx_range_{::nvtx3::event_attributes{                 \
        eldr_nvtx_name_, ::nvtx3::payload{static_cast<std::int64_t>(number)}}}
}  // namespace eldr
#else
#define ELDR_NVTX_RANGE(range_name, number) static_cast<void>(0)
#endif
