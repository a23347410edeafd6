// The norms of queries and keys, taken from and put back into rows of queries, keys and values without a copy between.
//
// Letters: R rows, A heads, E numbers of a head, a multiple of 16 up to 128. qkv is (R, 3, A, E), a norm's scale (E),
// all else (R, A, E).
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

template <int E>
struct Head {
    float centred[E], inverse;  // of the deviation

    Head(const float* x, float eps) {
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int e = 0; e < E; e++) sum += x[e];
        const float mean = sum / E;
#pragma omp simd reduction(+ : squares)
        for (int e = 0; e < E; e++) {
            centred[e] = x[e] - mean;
            squares += centred[e] * centred[e];
        }
        inverse = 1 / std::sqrt(squares / E + eps);
    }
};

template <int E>
void norm(const float* x, const float* scale, float* y, float eps) {
    const Head<E> head(x, eps);
#pragma omp simd
    for (int e = 0; e < E; e++) y[e] = head.centred[e] * head.inverse * scale[e];
}

// `dscale` is added to.
template <int E>
void norm_backward(const float* x, const float* scale, const float* dy, float* dx, float* dscale, float eps) {
    const Head<E> head(x, eps);
    float shift = 0, along = 0;
#pragma omp simd reduction(+ : shift, along)
    for (int e = 0; e < E; e++) {
        const float normal = head.centred[e] * head.inverse, d = dy[e] * scale[e];
        dscale[e] += dy[e] * normal;
        shift += d;
        along += d * normal;
    }
    shift /= E;
    along *= head.inverse / E;
#pragma omp simd
    for (int e = 0; e < E; e++) dx[e] = head.inverse * (dy[e] * scale[e] - shift - head.centred[e] * along);
}

template <int E>
void split(const float* qkv, const float* const* scales, float* const* out, int64_t R, int64_t A, const float* eps,
           int threads) {
    const int64_t D = A * E;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < R; r++)
        for (int part = 0; part < 2; part++)
            for (int64_t i = 0; i < D; i += E)
                norm<E>(qkv + (3 * r + part) * D + i, scales[part], out[part] + r * D + i, eps[part]);
}

template <int E>
void split_backward(const float* qkv, const float* const* scales, const float* const* d, float* dqkv,
                    float* const* dscales, int64_t R, int64_t A, const float* eps, int threads) {
    const int64_t D = A * E;
    std::vector<float> sums(threads * 2 * E);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
        float mine[2][E] = {};
        for (int64_t r = R * t / threads; r < R * (t + 1) / threads; r++) {
            for (int part = 0; part < 2; part++)
                for (int64_t i = 0; i < D; i += E) {
                    const int64_t at = (3 * r + part) * D + i;
                    const float* dy = d[part] + r * D + i;
                    norm_backward<E>(qkv + at, scales[part], dy, dqkv + at, mine[part], eps[part]);
                }
            std::memcpy(dqkv + (3 * r + 2) * D, d[2] + r * D, D * sizeof(float));
        }
        std::memcpy(&sums[t * 2 * E], mine, sizeof mine);
    }
    for (int t = 0; t < threads; t++)
        for (int e = 0; e < E; e++)
            for (int part = 0; part < 2; part++) dscales[part][e] += sums[(2 * t + part) * E + e];
}

}  // namespace

#define FOR_WIDTH(function, ...)                       \
    switch (E) {                                       \
        case 16: return function<16>(__VA_ARGS__);     \
        case 32: return function<32>(__VA_ARGS__);     \
        case 48: return function<48>(__VA_ARGS__);     \
        case 64: return function<64>(__VA_ARGS__);     \
        case 80: return function<80>(__VA_ARGS__);     \
        case 96: return function<96>(__VA_ARGS__);     \
        case 112: return function<112>(__VA_ARGS__);   \
        case 128: return function<128>(__VA_ARGS__);   \
    }

extern "C" {

void split_heads(const float* qkv, const float* query_scale, const float* key_scale, float* query, float* key,
                 int64_t R, int64_t A, int64_t E, float query_eps, float key_eps, int threads) {
    const float *scales[] = {query_scale, key_scale}, eps[] = {query_eps, key_eps};
    float* out[] = {query, key};
    FOR_WIDTH(split, qkv, scales, out, R, A, eps, threads)
}

// The gradients of the scales come as zeros.
void split_heads_backward(const float* qkv, const float* query_scale, const float* key_scale, const float* dquery,
                          const float* dkey, const float* dvalue, float* dqkv, float* dquery_scale, float* dkey_scale,
                          int64_t R, int64_t A, int64_t E, float query_eps, float key_eps, int threads) {
    const float *scales[] = {query_scale, key_scale}, eps[] = {query_eps, key_eps};
    const float* d[] = {dquery, dkey, dvalue};
    float* dscales[] = {dquery_scale, dkey_scale};
    FOR_WIDTH(split_backward, qkv, scales, d, dqkv, dscales, R, A, eps, threads)
}
}
