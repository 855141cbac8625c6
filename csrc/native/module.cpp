// eldr._native: the loops of routing that NumPy cannot express, over plain buffers; no torch.
#include "buffers.h"

namespace {

PyMethodDef methods[] = {
    {"assign_exact", eldr::assign_exact, METH_VARARGS,
     "assign_exact(cost f32[N, W], capacity i64[W], prices f64[W], out i32[N]) -> augmentations\n\n"
     "Cheapest assignment that fills bin w with exactly capacity[w] points; sum(capacity) == N."
     " The prices are a start, and come back optimal."},
    {"assign_prices", eldr::assign_prices, METH_VARARGS,
     "assign_prices(cost f32[N, W], capacity i64[W], prices f64[W], rounds, step) -> overfull\n\n"
     "Improves bin prices by dual ascent, in place; returns the points above capacity."},
    {"admit", eldr::admit, METH_VARARGS,
     "admit(counts u32[n], scale, mean f32[n], keep, cost u16[32768], x i16[n], step u16[n],"
     " sum u32[n]) -> any count\n\nx = min(trunc(counts * scale + (mean * keep + 0.5)), 32767), in"
     " float32 without contraction; step = cost[x]; sum += counts."},
    {"similarities", eldr::similarities, METH_VARARGS,
     "similarities(counts u32[n], weights f32[n], scale, rows u8[W, n], unit f64[W], of i64[C],"
     " out f64[C]) -> any weight\n\n"
     "x = min(trunc(counts * weights * scale + 0.5), 32767), in float32 without contraction;"
     " out[i] = <x, rows[of[i]]> * unit[of[i]] / |x|, untouched when x is zero."},
    {"dots", eldr::dots, METH_VARARGS,
     "dots(x i16[n], rows u8[W, n], out i64[W])\n\nExact integer dot products with every row."},
    {"place", eldr::place, METH_VARARGS,
     "place(x i16[n], survival u8[S, n], idle i64[S], requests i64[S], others f64[S], kv i64[S],"
     " weight f64[S], candidates i64[C], terms (9 floats), power, guard, out f64[C])"
     " -> (index of the best, its <x, survival>)\n\n"
     "The costs of eldr.routing.price for the candidates; infinite above the guard's load."},
    {"band", eldr::band, METH_VARARGS,
     "band(similarity f64[C], tau, requests i64[S], others f64[S], weight f64[S],"
     " candidates i64[C], inside i64[C]) -> (slot, count)\n\n"
     "The least loaded candidate within tau of the most similar; inside[:count] = all of those."},
    {"least", eldr::least, METH_VARARGS,
     "least(requests i64[S], others f64[S], weight f64[S], candidates i64[C], draw, out f64[C])"
     " -> index of the least loaded\n\nLoads of the candidates; draw (64 bits) breaks ties."},
    {"unbase64", eldr::unbase64, METH_O,
     "unbase64(text) -> bytes\n\nStrict base64 with padding; ValueError for anything else."},
    {"unpack", eldr::unpack, METH_VARARGS,
     "unpack(raw bytes, width, layers, out u32[layers * E]) -> (largest count, largest layer sum)\n\n"
     "Little-endian counts of 1, 2 or 4 bytes, as many as `out` holds; width 0: bytes, then the rest"
     " (4 bytes) of each that is 255."},
    {"shift", eldr::shift, METH_VARARGS,
     "shift(load i32[S, n], survival u8[S, n], idle i64[S], slot, step u16[n], sign, table u8[m])"
     "\n\nOf row `slot`: load += sign * step; survival = table[min(load, m - 1)]; idle = its sum."},
    // The decode pool of eldr.simulation; its typed face is eldr/simulation/native.py.
    {"simulate_new", eldr::simulate_new, METH_VARARGS, "A decode pool over a trace's arrays."},
    {"simulate_add", eldr::simulate_add, METH_VARARGS, "(pool, now) -> index of a new worker"},
    {"simulate_submit", eldr::simulate_submit, METH_VARARGS,
     "(pool, worker, id, row, steps, context, ready)"},
    {"simulate_advance", eldr::simulate_advance, METH_VARARGS,
     "(pool, until) -> [(time, worker, id)] of the requests that ended, in order"},
    {"simulate_fail", eldr::simulate_fail, METH_VARARGS, "(pool, worker) -> (running, waiting)"},
    {"simulate_totals", eldr::simulate_totals, METH_VARARGS,
     "(pool, worker, scalar f64[8], distinct f64[L], use f64[L * E] or [0])"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "eldr._native",
                          "Native loops of eldr.routing over plain buffers.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
