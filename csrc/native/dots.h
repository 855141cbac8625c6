// Exact integer dot products of an activation with survival rows.
#pragma once

#include <algorithm>
#include <cstdint>

namespace eldr {

constexpr int64_t kTile = 4;  // rows at a time: x is loaded once, and their sums overlap

// out[k] = <x, rows[k]> for kTile rows of n cells; x >= 0.
void dot_tile(const int16_t* x, const uint8_t* const* rows, int64_t n, int64_t* out);

// put(i, <x, row(i)>) for i in [0, count).
template <typename Row, typename Put>
void dot_rows(const int16_t* x, int64_t n, int64_t count, Row row, Put put) {
  for (int64_t start = 0; start < count; start += kTile) {
    const uint8_t* rows[kTile];
    int64_t found[kTile];
    for (int64_t k = 0; k < kTile; ++k) rows[k] = row(std::min(start + k, count - 1));
    dot_tile(x, rows, n, found);
    for (int64_t k = 0; k < kTile && start + k < count; ++k) put(start + k, found[k]);
  }
}

}  // namespace eldr
