// Attention straight from rows of queries, keys and values, and its gradient straight back into them. What belongs to
// one head stays in the cache: no copy of a part, no matrix of weights is ever written to memory.
//
// Letters: B sequences, M tokens, A heads, E numbers of a head, a multiple of 16 up to 256. qkv is (B, M, 3, A, E), its
// bias (3, A, E), a norm's scale (E) or null where there is no norm, what is attended (B, M, A, E), the logarithms of
// the softmax' sums (B, A, M), and `real` (B, M), or null if all are.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int ROWS = 6, WIDE = REGISTERS == 32 ? 4 : 2;  // of a tile whose sums stay in registers; vectors
constexpr int64_t QUERIES = 66;  // that are weighed together
constexpr int64_t AHEAD = 8;     // rows
constexpr int64_t WIDEST = 256;
constexpr float FAR = 1e30f;

// Rows of a head lie too far apart for the processor to guess the next.
template <int WRITE>
inline void fetch(const float* row, int64_t E) {
    for (int64_t e = 0; e < E; e += LANES) __builtin_prefetch(row + e, WRITE);
}

struct Matrix {
    float* at;
    int64_t row, column = 1;  // steps
};

// R rows of c, V vectors wide, = a b, or += a b.
template <bool ADD, int V, int R>
void tile(const float* a, int64_t row, int64_t column, const float* b, int64_t line, float* c, int64_t width,
          int64_t depth) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = ADD ? load(c + r * width + v * LANES) : Floats{};
    for (int64_t k = 0; k < depth; k++) {
        Floats part[V];
        for (int v = 0; v < V; v++) part[v] = load(b + k * line + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sums[r][v] += part[v] * a[r * row + k * column];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(c + r * width + v * LANES, sums[r][v]);
}

template <bool ADD, int V>
void panel(Matrix a, const float* b, int64_t line, float* c, int64_t width, int64_t rows, int64_t depth) {
    constexpr decltype(&tile<ADD, V, 1>) TILE[] = {tile<ADD, V, 1>, tile<ADD, V, 2>, tile<ADD, V, 3>,
                                                   tile<ADD, V, 4>, tile<ADD, V, 5>, tile<ADD, V, ROWS>};
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t count = rows - r < ROWS ? rows - r : ROWS;
        TILE[count - 1](a.at + r * a.row, a.row, a.column, b, line, c + r * width, width, depth);
    }
}

// c (rows, columns) = a b, or += a b; columns of b and c are side by side, and a multiple of 16.
template <bool ADD>
void product(Matrix a, Matrix b, Matrix c, int64_t rows, int64_t columns, int64_t depth) {
    constexpr decltype(&panel<ADD, 1>) PANEL[] = {panel<ADD, 1>, panel<ADD, 2>, panel<ADD, 3>, panel<ADD, 4>};
    const int64_t vectors = columns / LANES, panels = (vectors + WIDE - 1) / WIDE;
    for (int64_t p = 0; p < panels; p++) {  // as even as can be
        const int64_t first = p * vectors / panels, count = (p + 1) * vectors / panels - first;
        PANEL[count - 1](a, b.at + first * LANES, b.row, c.at + first * LANES, c.row, rows, depth);
    }
}

// How the queries, the keys or the values of a head are had from their rows: norm(x + bias) factor.
struct Part {
    const float *bias, *scale;
    float eps, factor;
    int64_t E;

    void read(const float* x, float* y) const {
        Floats centred[WIDEST / LANES];
        const float by = factor * (scale ? normal(x, centred) : 1);
        for (int64_t e = 0; e < E; e += LANES)
            store(y + e, scale ? centred[e / LANES] * by * load(scale + e) : (load(x + e) + load(bias + e)) * by);
    }

    // The gradients of bias and scale are added to.
    void back(const float* x, const float* dy, float* dx, float* dbias, float* dscale) const {
        Floats centred[WIDEST / LANES], shift = {}, along = {};
        const float inverse = scale ? normal(x, centred) : 1;
        if (scale)
            for (int64_t e = 0; e < E; e += LANES) {
                const Floats normal = centred[e / LANES] * inverse, d = load(dy + e) * factor, ds = d * load(scale + e);
                store(dscale + e, load(dscale + e) + d * normal);
                shift += ds;
                along += ds * normal;
            }
        const float mean = sum(shift) / E, by = sum(along) * inverse / E;
        for (int64_t e = 0; e < E; e += LANES) {
            Floats d = load(dy + e) * factor;
            if (scale) d = (d * load(scale + e) - mean - centred[e / LANES] * by) * inverse;
            store(dx + e, d);
            store(dbias + e, load(dbias + e) + d);
        }
    }

  private:
    // Tells how far x + bias is from its mean, and returns the inverse of the deviation.
    float normal(const float* x, Floats* centred) const {
        Floats total = {}, squares = {};
        for (int64_t e = 0; e < E; e += LANES) total += centred[e / LANES] = load(x + e) + load(bias + e);
        const float mean = sum(total) / E;
        for (int64_t e = 0; e < E; e += LANES) {
            centred[e / LANES] -= mean;
            squares += centred[e / LANES] * centred[e / LANES];
        }
        return 1 / std::sqrt(sum(squares) / E + eps);
    }
};

struct Sizes {
    int64_t B, M, A, E;

    int64_t padded() const { return (M + LANES - 1) / LANES * LANES; }
    int64_t width() const { return A * E; }
};

// Where one thread works on one head; every part begins at a multiple of a vector.
class Room {
    std::vector<float> memory;
    float* next;

  public:
    float *query, *key, *value, *attended, *key_T, *weights, *hidden;
    float *dquery, *dkey, *dvalue, *value_T, *dweights;  // for the backward pass alone

    Room(Sizes s, bool backward) {
        const int64_t rows = s.M * s.E, columns = s.padded() * s.E, block = QUERIES * s.padded();
        memory.resize(LANES + 4 * rows + columns + block + s.padded() +
                      (backward ? 3 * rows + columns + block : 0));
        next = memory.data() + LANES - reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float) % LANES;
        for (float** part : {&query, &key, &value, &attended}) *part = take(rows);
        key_T = take(columns);
        weights = take(block);
        hidden = take(s.padded());
        if (!backward) return;
        for (float** part : {&dquery, &dkey, &dvalue}) *part = take(rows);
        value_T = take(columns);
        dweights = take(block);
    }

  private:
    float* take(int64_t count) { return (next += count) - count; }
};

struct Head {
    Sizes s;
    const Part* parts;
    int64_t at;         // of its first query in qkv
    const bool* real;   // of its sequence

    int64_t place(int64_t m, int64_t part) const { return at + (3 * m + part) * s.width(); }

    void read(const float* qkv, const Room& room) const {
        float* const to[] = {room.query, room.key, room.value};
        for (int64_t m = 0; m < s.M; m++)
            for (int part = 0; part < 3; part++) {
                fetch<0>(qkv + place(m + AHEAD, part), s.E);
                parts[part].read(qkv + place(m, part), to[part] + m * s.E);
            }
        for (int64_t j = 0; j < s.padded(); j++) room.hidden[j] = j >= s.M || (real && !real[j]) ? -FAR : 0.0f;
        transpose(room.key, room.key_T);
    }

    // (M, E) -> (E, padded), with zeros at the end of each line.
    void transpose(const float* x, float* y) const {
        for (int64_t m = 0; m < s.padded(); m += LANES)
            for (int64_t e = 0; e < s.E; e++)
                for (int64_t i = m; i < m + LANES; i++) y[e * s.padded() + i] = i < s.M ? x[i * s.E + e] : 0.0f;
    }
};

// Turns a row of products into weights whose sum is returned inverted, and tells the logarithm of that sum. A row that
// may see nothing gets no weight at all.
float softmax(float* row, const float* hidden, int64_t count, float& logarithm) {
    Floats tops = same(-2 * FAR), sums = {};
    for (int64_t j = 0; j < count; j += LANES) {
        const Floats seen = load(row + j) + load(hidden + j);
        store(row + j, seen);
        tops = seen > tops ? seen : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    if (top < -FAR / 2) top = FAR;
    for (int64_t j = 0; j < count; j += LANES) {
        const Floats weight = exponential(load(row + j) - top);
        store(row + j, weight);
        sums += weight;
    }
    const float total = sum(sums);
    logarithm = total == 0 ? FAR : top + std::log(total);
    return total == 0 ? 0 : 1 / total;
}

void forward(const Head& head, const float* qkv, float* out, float* logarithms, const Room& room) {
    const Sizes s = head.s;
    const int64_t padded = s.padded();
    head.read(qkv, room);
    for (int64_t first = 0; first < s.M; first += QUERIES) {
        const int64_t rows = s.M - first < QUERIES ? s.M - first : QUERIES;
        float inverse[QUERIES];
        product<false>({room.query + first * s.E, s.E}, {room.key_T, padded}, {room.weights, padded}, rows, padded,
                       s.E);
        for (int64_t r = 0; r < rows; r++)
            inverse[r] = softmax(room.weights + r * padded, room.hidden, padded, logarithms[first + r]);
        product<false>({room.weights, padded}, {room.value, s.E}, {room.attended, s.E}, rows, s.E, s.M);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t e = 0; e < s.E; e += LANES)
                store(out + (first + r) * s.width() + e, load(room.attended + r * s.E + e) * inverse[r]);
    }
}

// The gradients of the biases and scales, (3, E) both, are added to; values have no scale.
void backward(const Head& head, const float* qkv, const float* out, const float* logarithms, const float* dout,
              float* dqkv, float* dbias, float* dscale, const Room& room) {
    const Sizes s = head.s;
    const int64_t padded = s.padded(), E = s.E;
    head.read(qkv, room);
    head.transpose(room.value, room.value_T);
    std::memset(room.dkey, 0, s.M * E * sizeof(float));
    std::memset(room.dvalue, 0, s.M * E * sizeof(float));
    for (int64_t first = 0; first < s.M; first += QUERIES) {
        const int64_t rows = s.M - first < QUERIES ? s.M - first : QUERIES;
        float *const query = room.query + first * E, *const dattended = room.attended;
        float along[QUERIES];
        for (int64_t r = 0; r < rows; r++) {
            const float *o = out + (first + r) * s.width(), *d = dout + (first + r) * s.width();
            fetch<0>(o + AHEAD * s.width(), E);
            fetch<0>(d + AHEAD * s.width(), E);
            Floats total = {};
            for (int64_t e = 0; e < E; e += LANES) {
                store(dattended + r * E + e, load(d + e));
                total += load(o + e) * load(d + e);
            }
            along[r] = sum(total);
        }
        product<false>({query, E}, {room.key_T, padded}, {room.weights, padded}, rows, padded, E);
        product<false>({dattended, E}, {room.value_T, padded}, {room.dweights, padded}, rows, padded, E);
        for (int64_t r = 0; r < rows; r++) {
            float *row = room.weights + r * padded, *drow = room.dweights + r * padded;
            const float logarithm = logarithms[first + r], minus = along[r];
            for (int64_t j = 0; j < padded; j += LANES) {
                const Floats weight = exponential(load(row + j) + load(room.hidden + j) - logarithm);
                store(row + j, weight);
                store(drow + j, weight * (load(drow + j) - minus));
            }
        }
        product<true>({room.weights, 1, padded}, {dattended, E}, {room.dvalue, E}, s.M, E, rows);
        product<false>({room.dweights, padded}, {room.key, E}, {room.dquery + first * E, E}, rows, E, s.M);
        product<true>({room.dweights, 1, padded}, {query, E}, {room.dkey, E}, s.M, E, rows);
    }
    const float* const from[] = {room.dquery, room.dkey, room.dvalue};
    for (int64_t m = 0; m < s.M; m++)
        for (int part = 0; part < 3; part++) {
            const int64_t place = head.place(m, part);
            fetch<0>(qkv + head.place(m + AHEAD, part), E);
            fetch<1>(dqkv + head.place(m + AHEAD, part), E);
            head.parts[part].back(qkv + place, from[part] + m * E, dqkv + place, dbias + part * E, dscale + part * E);
        }
}

// Calls f(its number, head, where its results begin, room) for all heads.
template <class F>
void for_heads(Sizes s, const float* bias, const float* query_scale, const float* key_scale, const bool* real,
               float query_eps, float key_eps, bool backward, int threads, F f) {
#pragma omp parallel num_threads(threads)
    {
        const Room room(s, backward);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s.B * s.A; i++) {
            const int64_t b = i / s.A, a = i % s.A, D = s.width();
            const float* own = bias + a * s.E;
            const Part parts[] = {{own, query_scale, query_eps, 1 / std::sqrt(float(s.E)), s.E},
                                  {own + D, key_scale, key_eps, 1, s.E},
                                  {own + 2 * D, nullptr, 0, 1, s.E}};
            f(i, Head{s, parts, b * s.M * 3 * D + a * s.E, real ? real + b * s.M : nullptr}, b * s.M * D + a * s.E,
              room);
        }
    }
}

}  // namespace

extern "C" {

void attend(const float* qkv, const float* bias, const float* query_scale, const float* key_scale, const bool* real,
            float* out, float* logarithms, int64_t B, int64_t M, int64_t A, int64_t E, float query_eps, float key_eps,
            int threads) {
    for_heads({B, M, A, E}, bias, query_scale, key_scale, real, query_eps, key_eps, false, threads,
              [=](int64_t i, const Head& head, int64_t at, const Room& room) {
                  forward(head, qkv, out + at, logarithms + i * M, room);
              });
}

// The gradients of bias and scales (null where there are none) come as zeros; they are added up in one order, whatever
// the threads do.
void attend_backward(const float* qkv, const float* bias, const float* query_scale, const float* key_scale,
                     const bool* real, const float* out, const float* logarithms, const float* dout, float* dqkv,
                     float* dbias, float* dquery_scale, float* dkey_scale, int64_t B, int64_t M, int64_t A, int64_t E,
                     float query_eps, float key_eps, int threads) {
    std::vector<float> sums(B * A * 6 * E);
    for_heads({B, M, A, E}, bias, query_scale, key_scale, real, query_eps, key_eps, true, threads,
              [=, &sums](int64_t i, const Head& head, int64_t at, const Room& room) {
                  float* mine = &sums[i * 6 * E];
                  backward(head, qkv, out + at, logarithms + i * M, dout + at, dqkv, mine, mine + 3 * E, room);
              });
    float* const dscales[] = {dquery_scale, dkey_scale};
    for (int64_t i = 0; i < B * A; i++)
        for (int part = 0; part < 3; part++)
            for (int64_t e = 0; e < E; e++) {
                dbias[(part * A + i % A) * E + e] += sums[(i * 6 + part) * E + e];
                if (part < 2 && dscales[part]) dscales[part][e] += sums[(i * 6 + 3 + part) * E + e];
            }
}
}
