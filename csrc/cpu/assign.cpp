// assign: requests in order, each to the best worker by the rule, on loads that the earlier ones have changed. Float
// expressions are evaluated as written (no contraction), so that every backend picks the same worker.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../eldr_launch.h"

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

float usable(float score) { return std::isnan(score) ? kNever : score; }

int least_load(int workers, const eldr_assign_args& a) {
  const int best = static_cast<int>(std::min_element(a.load, a.load + workers) - a.load);
  return a.load[best] == ELDR_CLOSED ? -1 : best;
}

int locality_band(const float* scores, int workers, const eldr_assign_args& a) {
  float top = kNever;
  for (int w = 0; w < workers; ++w) {
    if (a.load[w] != ELDR_CLOSED) top = std::max(top, usable(scores[w]));
  }
  const float floor = top - a.tau;
  int best = -1;
  for (int w = 0; w < workers; ++w) {
    const float score = usable(scores[w]);
    if (a.load[w] == ELDR_CLOSED || !(score >= floor)) continue;
    const bool better = best < 0 || a.load[w] < a.load[best] ||
                        (a.load[w] == a.load[best] && score > usable(scores[best]));
    if (better) best = w;
  }
  return best;
}

float added_experts(float score) { return std::isnan(score) ? 0.0f : std::max(score, 0.0f); }

int marginal_cost(const float* scores, int request, int workers, const eldr_assign_args& a) {
  const float* distinct = a.state;
  const float* kv = a.state + workers;
  float least = std::numeric_limits<float>::infinity();
  int best = -1;
  for (int w = 0; w < workers; ++w) {
    if (a.load[w] == ELDR_CLOSED) continue;
    const auto n = static_cast<float>(a.load[w]);
    const float more = (a.c_expert * added_experts(scores[w]) + a.c_kv * a.request_kv[request]) + a.c_request;
    const float now = (a.c_expert * distinct[w] + a.c_kv * kv[w]) + a.c_request * n;
    const float total = (now + more) + (a.hedge * n) * more;
    const float cost = std::isnan(total) ? std::numeric_limits<float>::infinity() : total;
    if (best < 0 || cost < least) {
      least = cost;
      best = w;
    }
  }
  return best;
}

int choose(const float* scores, int request, int workers, const eldr_assign_args& a) {
  switch (a.rule) {
    case ELDR_RULE_LEAST_LOAD: return least_load(workers, a);
    case ELDR_RULE_LOCALITY_BAND: return locality_band(scores, workers, a);
    default: return marginal_cost(scores, request, workers, a);
  }
}

}  // namespace

extern "C" int eldr_cpu_assign(const float* scores, int requests, int workers, const eldr_assign_args* args) {
  const eldr_assign_args& a = *args;
  for (int r = 0; r < requests; ++r) {
    const float* row = scores + static_cast<int64_t>(r) * workers;
    const int best = choose(row, r, workers, a);
    a.chosen[r] = best;
    if (best < 0) continue;
    const int64_t load = static_cast<int64_t>(a.load[best]) + std::max(a.cost[r], 0);
    a.load[best] = static_cast<int32_t>(std::min<int64_t>(load, ELDR_CLOSED - 1));
    if (a.rule == ELDR_RULE_MARGINAL_COST) {
      a.state[best] += added_experts(row[best]);
      a.state[workers + best] += a.request_kv[r];
    }
  }
  return 0;
}
