// Products of stacked matrices. With few rows one read of the weights, or one write of their gradients, is all that they
// should cost; with more than FEW the products are those of tiles.h.
//
// Letters: N matrices, S rows, w is (N, P, Q) with Q numbers side by side. All float32, Q a multiple of 16.
//
//   matmul   y (N, S, Q) = x (N, S, P) w + bias (N, Q)
//   matmul_t y (N, S, P) = x (N, S, Q) w^T + bias (N, P)
//   outer    w (N, P, Q) = a^T b, a is (N, S, P), b is (N, S, Q)
//
// A bias may be null. Rows are taken a few at a time; what of w they share is read from memory once.
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr int ROWS = REGISTERS == 32 ? 8 : 4, WIDE = 3;
constexpr int FEW = 8, HELD = REGISTERS / 4;  // rows of y, and lines of w in registers, in `matmul`
constexpr int64_t LINES = 32;  // of w, that are read together: they stay in the second cache
constexpr int64_t SPAN = 512;  // numbers of a line that are written together: the rows' parts stay in the first cache
constexpr int64_t SPAN_OF_ALL = 1 << 16;  // numbers of all rows together, if there are more than FEW: in the second cache

// R rows of y take L lines of w, which are read from left to right as they lie in memory; the lines `ahead` are fetched.
template <int R, int L, int V>
inline void add_lines(const float* x, const float* w, float* y, int64_t from, int64_t to, int64_t ahead, int64_t P,
                      int64_t Q) {
    for (int64_t q = from; q < to; q += V * LANES) {
        Floats line[L][V];
        for (int l = 0; l < L; l++) {
            for (int v = 0; v < V; v++) line[l][v] = load(w + l * Q + q + v * LANES);
            __builtin_prefetch(w + (l + ahead) * Q + q, 0, 2);
        }
        for (int r = 0; r < R; r++) {
            Floats sums[V];
            for (int v = 0; v < V; v++) sums[v] = load(y + r * Q + q + v * LANES);
            for (int l = 0; l < L; l++) {
                const Floats factor = same(x[r * P + l]);
                for (int v = 0; v < V; v++) sums[v] += line[l][v] * factor;
            }
            for (int v = 0; v < V; v++) store(y + r * Q + q + v * LANES, sums[v]);
        }
    }
}

template <int R>
void matmul_rows(const float* x, const float* w, float* y, int64_t count, int64_t ahead, int64_t P, int64_t Q) {
    const int64_t even = Q / (2 * LANES) * (2 * LANES);
    int64_t p = 0;
    for (; p + HELD <= count; p += HELD) {
        add_lines<R, HELD, 2>(x + p, w + p * Q, y, 0, even, ahead, P, Q);
        add_lines<R, HELD, 1>(x + p, w + p * Q, y, even, Q, ahead, P, Q);
    }
    for (; p < count; p++) add_lines<R, 1, 1>(x + p, w + p * Q, y, 0, Q, ahead, P, Q);
}

// R rows of x against J lines of w. The lines `ahead` are fetched meanwhile.
template <int R, int J>
void matmul_t_tile(const float* x, const float* w, const float* bias, float* y, int64_t ahead, int64_t P, int64_t Q) {
    Floats sums[R][J] = {};
    for (int64_t q = 0; q < Q; q += LANES) {
        Floats lines[J];
        for (int j = 0; j < J; j++) {
            lines[j] = load(w + j * Q + q);
            __builtin_prefetch(w + (j + ahead) * Q + q, 0, 2);
        }
        for (int r = 0; r < R; r++) {
            const Floats row = load(x + r * Q + q);
            for (int j = 0; j < J; j++) sums[r][j] += row * lines[j];
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) y[r * P + j] = sum(sums[r][j]) + (bias ? bias[j] : 0.0f);
}

template <int R>
void matmul_t_rows(const float* x, const float* w, const float* bias, float* y, int64_t count, int64_t P, int64_t Q) {
    int64_t p = 0;
    for (; p + WIDE <= count; p += WIDE)
        matmul_t_tile<R, WIDE>(x, w + p * Q, bias ? bias + p : nullptr, y + p, WIDE, P, Q);
    for (; p < count; p++) matmul_t_tile<R, 1>(x, w + p * Q, bias ? bias + p : nullptr, y + p, 1, P, Q);
}

constexpr decltype(&matmul_rows<1>) MATMUL[] = {matmul_rows<1>, matmul_rows<2>, matmul_rows<3>, matmul_rows<4>,
                                                matmul_rows<5>, matmul_rows<6>, matmul_rows<7>, matmul_rows<8>};
constexpr decltype(&matmul_t_rows<1>) MATMUL_T[] = {matmul_t_rows<1>, matmul_t_rows<2>, matmul_t_rows<3>, matmul_t_rows<4>,
                                              matmul_t_rows<5>, matmul_t_rows<6>, matmul_t_rows<7>, matmul_t_rows<8>};

// J lines of w from S rows, whose J factors stay in registers. Returns the sum of the squares of what is written.
template <int S, int J>
inline double outer_tile(const float* a, const float* b, float* w, int64_t P, int64_t Q, int64_t length) {
    Floats factors[S][J], squares = {};
    for (int s = 0; s < S; s++)
        for (int j = 0; j < J; j++) factors[s][j] = Floats{} + a[s * P + j];
    for (int64_t q = 0; q < length; q += LANES) {
        Floats lines[J] = {};
        for (int s = 0; s < S; s++) {
            const Floats row = load(b + s * Q + q);
            for (int j = 0; j < J; j++) lines[j] += factors[s][j] * row;
        }
        for (int j = 0; j < J; j++) {
            squares += lines[j] * lines[j];
            store_far(w + j * Q + q, lines[j]);
        }
    }
    return sum(squares);
}

template <int S>
double outer_of(const float* a, const float* b, float* w, int64_t, int64_t P, int64_t Q, int64_t length) {
    constexpr int J = S <= 4 && REGISTERS == 32 ? 4 : 2;
    double squares = 0;
    int64_t p = 0;
    for (; p + J <= P; p += J) squares += outer_tile<S, J>(a + p, b, w + p * Q, P, Q, length);
    for (; p < P; p++) squares += outer_tile<S, 1>(a + p, b, w + p * Q, P, Q, length);
    return squares;
}

constexpr decltype(&outer_of<1>) OUTER[] = {outer_of<1>, outer_of<2>, outer_of<3>, outer_of<4>,
                                            outer_of<5>, outer_of<6>, outer_of<7>, outer_of<8>};

}  // namespace

extern "C" void matmul(const float* x, const float* w, const float* bias, float* y, int64_t N, int64_t S, int64_t P,
                       int64_t Q, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t n = 0; n < N; n++) {
        if (S > FEW) {
            matmul_tiles(x + n * S * P, w + n * P * Q, bias ? bias + n * Q : nullptr, y + n * S * Q, S, P, Q);
            continue;
        }
        for (int64_t s = n * S; s < (n + 1) * S; s++) {
            if (bias) std::memcpy(y + s * Q, bias + n * Q, Q * sizeof(float));
            else std::memset(y + s * Q, 0, Q * sizeof(float));
        }
        for (int64_t p = 0; p < P; p += LINES) {
            const int64_t count = least(LINES, P - p), ahead = p + 2 * LINES <= P ? HELD : 0;
            MATMUL[S - 1](x + n * S * P + p, w + (n * P + p) * Q, y + n * S * Q, count, ahead, P, Q);
        }
    }
}

extern "C" void matmul_t(const float* x, const float* w, const float* bias, float* y, int64_t N, int64_t S, int64_t P,
                      int64_t Q, int threads) {
    const int64_t tiles = (S + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t n = 0; n < N; n++) {
        if (S > FEW) {
            matmul_t_tiles(x + n * S * Q, w + n * P * Q, bias ? bias + n * P : nullptr, y + n * S * P, S, P, Q);
            continue;
        }
        for (int64_t p = 0; p < P; p += LINES) {
            const int64_t count = least(LINES, P - p);
            for (int64_t t = 0; t < tiles; t++) {  // of rows, as even as can be
                const int64_t top = n * S + t * S / tiles, bottom = n * S + (t + 1) * S / tiles;
                MATMUL_T[bottom - top - 1](x + top * Q, w + (n * P + p) * Q, bias ? bias + n * P + p : nullptr,
                                        y + top * P + p, count, P, Q);
            }
        }
    }
}

// Returns the sum of the squares of w, added up in one order whatever the threads do.
extern "C" double outer(const float* a, const float* b, float* w, int64_t N, int64_t S, int64_t P, int64_t Q,
                        int threads) {
    const int64_t span = S <= FEW ? SPAN : parts(SPAN_OF_ALL / 64, S) * 64, spans = (Q + span - 1) / span;
    std::vector<double> squares(N * spans);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t n = 0; n < N; n++) {
            for (int64_t k = 0; k < spans; k++) {
                const int64_t first = k * span, length = least(span, Q - first);
                const auto product = S <= FEW ? OUTER[S - 1] : outer_tiles;
                squares[n * spans + k] =
                    product(a + n * S * P, b + n * S * Q + first, w + n * P * Q + first, S, P, Q, length);
            }
        }
        end_of_far_stores();
    }
    return std::accumulate(squares.begin(), squares.end(), 0.0);
}
