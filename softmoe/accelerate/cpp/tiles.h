// Products of stacked matrices with many rows, by tiles whose sums stay in registers.
//
// Letters and layouts are those of experts.cpp. One factor of a tile is read a number at a time, as it lies in memory where
// its lines go along with the steps; the other, a panel of COLUMNS numbers a step, is first laid close together: lines a
// multiple of 2048 bytes apart push each other out of the caches. While a tile is computed, weights that later ones need
// are fetched, a line every few steps.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

// Of a tile. With twelve lines, for which wider processors have registers too, there are more addresses than these have.
constexpr int TALL = 6, COLUMNS = 2 * LANES;
constexpr int64_t LINE = 16;  // numbers in a line of the cache
constexpr int64_t RUN = 256;  // numbers side by side that are fetched one after the other
constexpr int64_t DEPTH = 192, DEPTH_T = 256;  // steps of a tile: its panel stays in the first cache
constexpr int64_t EVERY = 32 / COLUMNS;  // steps between two fetched lines: no more than one is needed in them

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t parts(int64_t count, int64_t most) { return (count + most - 1) / most; }

// Runs of memory, `stride` numbers apart, that are fetched `rate` 256ths of a line at a time.
struct Ahead {
    const float* from;
    int64_t stride, rate, at;
};

// sums = the product of R lines of `a`, whose numbers are `stride` apart from line to line and `step` from step to step,
// and V vectors of `b`, COLUMNS apart; or, if PACK, `far` apart, with a copy left in `packed`.
template <int R, int V, bool PACK>
inline void multiply(Floats (&sums)[R][V], const float* __restrict a, int64_t stride, int64_t step,
                     const float* __restrict b, int64_t depth, Ahead* ahead, int64_t far = 0,
                     float* __restrict packed = nullptr) {
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = Floats{};
    uint64_t at = ahead->at;
    for (int64_t k = 0; k < depth; k++) {
        if (k % EVERY == 0) {
            const uint64_t line = at >> 8;
            __builtin_prefetch(ahead->from + line / (RUN / LINE) * ahead->stride + line % (RUN / LINE) * LINE, 0, 2);
            at += ahead->rate;
        }
        Floats line[V];
        for (int v = 0; v < V; v++) line[v] = load(b + v * LANES);
        if (PACK)
            for (int v = 0; v < V; v++) store(packed + k * COLUMNS + v * LANES, line[v]);
        for (int r = 0; r < R; r++) {
            const Floats factor = same(a[r * stride + k * step]);
            for (int v = 0; v < V; v++) sums[r][v] += factor * line[v];
        }
        b += PACK ? far : COLUMNS;
    }
    ahead->at = at;
}

// Calls `tile` with the number of rows, from 1 to TALL, and that of vectors, 1 or 2, as constants.
template <int R = TALL, class Tile>
inline void with_size(int64_t rows, int64_t width, Tile tile) {
    if constexpr (R > 1) {
        if (rows < R) return with_size<R - 1>(rows, width, tile);
    }
    if (width > LANES) tile(std::integral_constant<int, R>{}, std::integral_constant<int, 2>{});
    else tile(std::integral_constant<int, R>{}, std::integral_constant<int, 1>{});
}

// Part of R rows of y from `depth` lines of w, which are `w` as they lie, or null where `packed` has them. The sums begin
// with the numbers at `start`, if any.
template <int R, int V>
__attribute__((noinline)) void matmul_part(const float* x, int64_t P, const float* w, float* packed, const float* start,
                                           int64_t start_stride, float* y, int64_t Q, int64_t depth, Ahead* ahead) {
    Floats sums[R][V];
    if (w) multiply<R, V, true>(sums, x, P, 1, w, depth, ahead, Q, packed);
    else multiply<R, V, false>(sums, x, P, 1, packed, depth, ahead);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            const Floats before = start ? load(start + r * start_stride + v * LANES) : Floats{};
            store(y + r * Q + v * LANES, sums[r][v] + before);
        }
}

// y of one expert. The weights of the next one are fetched at the end.
inline void matmul_tiles(const float* x, const float* w, const float* bias, float* y, int64_t S, int64_t P, int64_t Q) {
    const int64_t tiles = parts(S, TALL), depth = parts(P, parts(P, DEPTH));
    const int64_t rate = parts(256 * EVERY * COLUMNS / LINE, tiles);
    thread_local std::vector<float> packed;
    packed.resize(depth * COLUMNS);
    for (int64_t run = 0; run < Q; run += RUN)
        for (int64_t p = 0; p < P; p += depth) {
            const bool last = p + depth >= P;
            Ahead ahead{last ? w + (run + RUN < Q ? run + RUN : P * Q) : w + (p + depth) * Q + run, Q, rate, 0};
            for (int64_t q = run; q < least(run + RUN, Q); q += COLUMNS)
                for (int64_t t = 0; t < tiles; t++) {
                    const int64_t top = t * S / tiles, bottom = (t + 1) * S / tiles;
                    float* out = y + top * Q + q;
                    const float* start = p ? out : bias ? bias + q : nullptr;
                    with_size(bottom - top, Q - q, [&](auto r, auto v) {
                        matmul_part<r, v>(x + top * P + p, P, t ? nullptr : w + p * Q + q, packed.data(), start, p ? Q : 0, out,
                                          Q, least(depth, P - p), &ahead);
                    });
                }
        }
}

// (rows, depth) as it lies -> (depth, COLUMNS), filled up with zeros.
inline void pack_turned(const float* from, int64_t stride, int64_t rows, int64_t depth, float* to) {
    turn(from, stride, rows, depth, to, COLUMNS);
    for (int64_t k = 0; k < depth; k++)
        for (int64_t r = rows; r < COLUMNS; r++) to[k * COLUMNS + r] = 0.0f;
}

// R lines of w with a panel of rows of x, turned: the sums (R, COLUMNS) so far are at `sums_before`.
template <int R, int V>
__attribute__((noinline)) void matmul_t_part(const float* w, int64_t Q, const float* panel, float* sums_before, bool first,
                                             int64_t depth, Ahead* ahead) {
    Floats sums[R][V];
    multiply<R, V, false>(sums, w, Q, 1, panel, depth, ahead);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float* place = sums_before + r * COLUMNS + v * LANES;
            store(place, first ? sums[r][v] : sums[r][v] + load(place));
        }
}

// y of one expert, computed as y^T = w x^T, so that w is read as it lies.
inline void matmul_t_tiles(const float* x, const float* w, const float* bias, float* y, int64_t S, int64_t P, int64_t Q) {
    const int64_t panels = parts(S, COLUMNS), tiles = parts(P, TALL), depth = parts(Q, parts(Q, DEPTH_T));
    const int64_t rate = parts(256 * EVERY * TALL / LINE, panels);
    thread_local std::vector<float> packed, sums;
    packed.resize(panels * COLUMNS * depth);
    sums.resize(panels * COLUMNS * tiles * TALL);
    for (int64_t q = 0; q < Q; q += depth) {
        const int64_t steps = least(depth, Q - q);
        for (int64_t s = 0; s < S; s += COLUMNS)
            pack_turned(x + s * Q + q, Q, least(COLUMNS, S - s), steps, &packed[s * depth]);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t top = t * P / tiles, bottom = (t + 1) * P / tiles;
            Ahead ahead{bottom < P || q + depth >= Q ? w + bottom * Q + q : w + q + depth, Q, rate, 0};
            for (int64_t s = 0; s < S; s += COLUMNS)
                with_size(bottom - top, S - s, [&](auto r, auto v) {
                    matmul_t_part<r, v>(w + top * Q + q, Q, &packed[s * depth], &sums[(t * panels * COLUMNS + s) * TALL], q == 0,
                                        steps, &ahead);
                });
        }
    }
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t s = 0; s < S; s++) {
            const int64_t panel = s / COLUMNS * COLUMNS, top = t * P / tiles, bottom = (t + 1) * P / tiles;
            const float* column = &sums[(t * panels * COLUMNS + panel) * TALL + s - panel];
            for (int64_t p = top; p < bottom; p++) y[s * P + p] = column[(p - top) * COLUMNS] + (bias ? bias[p] : 0.0f);
        }
}

// R lines of w from their S factors each, (S, TALL) at `a`, and the rows of b, which are `b` as they lie, or null where
// `packed` has them. Adds the squares of what it writes.
template <int R, int V>
__attribute__((noinline)) void outer_part(const float* a, const float* b, float* packed, float* w, int64_t S, int64_t Q,
                                          Floats* squares) {
    Floats sums[R][V];
    Ahead none{a, 0, 0, 0};
    if (b) multiply<R, V, true>(sums, a, 1, TALL, b, S, &none, Q, packed);
    else multiply<R, V, false>(sums, a, 1, TALL, packed, S, &none);
    Floats added[V] = {};  // in registers, and in V chains: each link waits for the one before
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            added[v] += sums[r][v] * sums[r][v];
            store_far(w + r * Q + v * LANES, sums[r][v]);
        }
    for (int v = 0; v < V; v++) *squares += added[v];
}

// The first `length` columns of one expert's w = a^T b, line after line: stores that jump from page to page are slow.
// Returns the sum of their squares.
inline double outer_tiles(const float* a, const float* b, float* w, int64_t S, int64_t P, int64_t Q, int64_t length) {
    const int64_t tiles = parts(P, TALL);
    thread_local std::vector<float> factors, packed;
    factors.resize(S * TALL);
    packed.resize(S * parts(length, COLUMNS) * COLUMNS);
    double total = 0;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t top = t * P / tiles, lines = (t + 1) * P / tiles - top;
        for (int64_t s = 0; s < S; s++) {
            if (lines == TALL) std::memcpy(&factors[s * TALL], a + s * P + top, sizeof(float) * TALL);  // inlined
            else std::memcpy(&factors[s * TALL], a + s * P + top, sizeof(float) * lines);
        }
        Floats squares = {};
        for (int64_t q = 0; q < length; q += COLUMNS)
            with_size(lines, length - q, [&](auto r, auto v) {
                outer_part<r, v>(factors.data(), t ? nullptr : b + q, &packed[q * S], w + top * Q + q, S, Q, &squares);
            });
        total += sum(squares);
    }
    return total;
}
