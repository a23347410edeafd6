// y[n] = (x[n] @ w[n]) * scale[n] + bias[n] for stacked matrices whose weights are stored in few bits.
//
// Letters: N matrices, S rows, K inputs, C outputs. x is (N, S, K), y is (N, S, C), both float32. The weights lie in
// panels of 64 outputs, (N, ceil(C / 64), K, 64), so that each panel is one stream through memory. They become float32
// in registers, where up to six rows share each of them: with few rows the time is that of reading the weights, with
// many that of the multiplications. Nothing is ever unpacked into memory.
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

constexpr int PANEL = 64, VECTORS = PANEL / LANES, ROWS = 6;
[[maybe_unused]] constexpr int BYTE_ROWS = 4;  // with more, GCC 12 moves the sums to the stack and back

typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

using ::load;
struct Float16 { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

inline Floats load(const BFloat16* p) {
    Halves bits;
    std::memcpy(&bits, p, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// Compilers turn the portable forms below into long sequences; where the processor has one instruction, it is named.
inline Floats load(const Float16* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    // Exponent and fraction move into place; the factor mends the exponent's bias, and subnormal numbers with it.
    Halves bits;
    std::memcpy(&bits, p, sizeof bits);
    const Words wide = __builtin_convertvector(bits, Words);
    return (Floats)(((wide & 0x7fff) << 13) | ((wide & 0x8000) << 16)) * 0x1p112f;
#endif
}

inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

// Vectors of a panel that R rows take at a time, such that their sums stay in registers.
constexpr int wide(int R) { return REGISTERS == 32 ? 4 : R == 1 ? 8 : R == 2 ? 4 : 2; }

// R rows of x against one panel. scale may be null; only `width` outputs of the panel are real.
template <int R, class W>
void tile(const float* x, const W* panel, int64_t K, const float* scale, const float* bias, float* y, int64_t C,
          int width) {
    constexpr int V = wide(R);
    for (int first = 0; first < width; first += V * LANES) {
        Floats sums[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sums[r][v] = Floats{};
        for (int64_t k = 0; k < K; k++) {
            Floats weights[V];
            for (int v = 0; v < V; v++) weights[v] = load(panel + k * PANEL + first + v * LANES);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sums[r][v] += weights[v] * x[r * K + k];
        }
        for (int r = 0; r < R; r++) {
            float row[V * LANES];
            for (int v = 0; v < V; v++) store(row + v * LANES, sums[r][v]);
            for (int c = 0; c < V * LANES && first + c < width; c++)
                y[r * C + first + c] = row[c] * (scale ? scale[first + c] : 1.0f) + bias[first + c];
        }
    }
}

template <class W>
void rows(int count, const float* x, const W* panel, int64_t K, const float* scale, const float* bias, float* y,
          int64_t C, int width) {
    switch (count) {
        case 1: return tile<1>(x, panel, K, scale, bias, y, C, width);
        case 2: return tile<2>(x, panel, K, scale, bias, y, C, width);
        case 3: return tile<3>(x, panel, K, scale, bias, y, C, width);
        case 4: return tile<4>(x, panel, K, scale, bias, y, C, width);
        case 5: return tile<5>(x, panel, K, scale, bias, y, C, width);
        case 6: return tile<6>(x, panel, K, scale, bias, y, C, width);
    }
}

// What there is to do of (N, S, C): a panel of 64 outputs of a matrix by up to `most` of its rows, tiles of rows as even as
// can be. work(matrix, panel, first of all N * S rows, rows, outputs of the panel that are real).
template <class Work>
void over_panels(int64_t N, int64_t S, int64_t C, int64_t most, int threads, Work work) {
    const int64_t panels = (C + PANEL - 1) / PANEL, tiles = (S + most - 1) / most;
    const int64_t chunk = N * panels < 32 * threads ? 1 : 2;
#pragma omp parallel for collapse(2) schedule(dynamic, chunk) num_threads(threads)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t p = 0; p < panels; p++) {
            const int width = (int)(C - p * PANEL < PANEL ? C - p * PANEL : PANEL);
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t top = t * S / tiles, bottom = (t + 1) * S / tiles;
                work(n, p, n * S + top, (int)(bottom - top), width);
            }
        }
    }
}

template <class W>
void product(const float* x, const W* w, const float* scale, const float* bias, float* y, int64_t N, int64_t S,
             int64_t K, int64_t C, int threads) {
    const int64_t panels = (C + PANEL - 1) / PANEL;
    over_panels(N, S, C, ROWS, threads, [=](int64_t n, int64_t p, int64_t row, int count, int width) {
        const int64_t first = p * PANEL, start = n * C + first;
        rows(count, x + row * K, w + (n * panels + p) * K * PANEL, K, scale ? scale + start : nullptr, bias + start,
             y + row * C + first, C, width);
    });
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// A row as bytes: x[k] = low + step * bytes[k], 256 steps from its smallest to its largest number. Numbers that are not
// finite make the step or the low one not finite, and with it the whole row of outputs.
struct Steps { float low, step; };

Steps to_bytes(const float* x, int64_t K, uint8_t* bytes) {
    __m512 low = _mm512_set1_ps(x[0]), high = low, check = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += LANES) {
        const __mmask16 mask = K - k < LANES ? (__mmask16)((1u << (K - k)) - 1) : (__mmask16)0xffff;
        const __m512 values = _mm512_mask_loadu_ps(_mm512_set1_ps(x[0]), mask, x + k);
        low = _mm512_min_ps(low, values);
        high = _mm512_max_ps(high, values);
        check = _mm512_fmadd_ps(values, _mm512_setzero_ps(), check);  // 0, or not a number
    }
    const float least = _mm512_reduce_min_ps(low), most = _mm512_reduce_max_ps(high), zero = _mm512_reduce_add_ps(check);
    const float step = most > least ? (most - least) / 255.0f : 1.0f;
    const __m512 start = _mm512_set1_ps(least), inverse = _mm512_set1_ps(1.0f / step);
    for (int64_t k = 0; k < K; k += LANES) {
        const __mmask16 mask = K - k < LANES ? (__mmask16)((1u << (K - k)) - 1) : (__mmask16)0xffff;
        const __m512 values = _mm512_maskz_loadu_ps(mask, x + k);
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(values, start), inverse));
        _mm512_mask_cvtusepi32_storeu_epi8(bytes + k, mask, whole);
    }
    return {least + zero, step};
}

// As tile, for rows of bytes and weights in groups of four inputs: (K / 4, 64 outputs, 4 inputs).
template <int R>
void byte_tile(const uint8_t* x, const Steps* steps, const int8_t* panel, int64_t K, const float* scale,
               const float* sums_of_weights, const float* bias, float* y, int64_t C, int width) {
    __m512i sums[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_setzero_si512();
    for (int64_t k = 0; k < K; k += 4) {
        __m512i weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = _mm512_loadu_si512(panel + k * PANEL + v * 64);
        for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, x + r * K + k, 4);
            const __m512i inputs = _mm512_set1_epi32(four);
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], inputs, weights[v]);
        }
    }
    for (int r = 0; r < R; r++) {
        int32_t row[PANEL];
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_si512(row + v * LANES, sums[r][v]);
        for (int c = 0; c < width; c++)
            y[r * C + c] = ((float)row[c] * steps[r].step + steps[r].low * sums_of_weights[c]) * scale[c] + bias[c];
    }
}

void byte_rows(int count, const uint8_t* x, const Steps* steps, const int8_t* panel, int64_t K, const float* scale,
               const float* sums, const float* bias, float* y, int64_t C, int width) {
    switch (count) {
        case 1: return byte_tile<1>(x, steps, panel, K, scale, sums, bias, y, C, width);
        case 2: return byte_tile<2>(x, steps, panel, K, scale, sums, bias, y, C, width);
        case 3: return byte_tile<3>(x, steps, panel, K, scale, sums, bias, y, C, width);
        case 4: return byte_tile<4>(x, steps, panel, K, scale, sums, bias, y, C, width);
    }
}

#endif

}  // namespace

// Rows rounded to bytes as they come, weights in bytes: y = x @ (w * scale) + bias with 32-bit sums. K is a multiple of
// four, `bytes` (N, S, K) and `steps` (N, S, 2) are room to work in, sums_of_weights is (N, C). Returns 0 where the
// processor has no such instruction.
extern "C" int product_bytes(const float* x, const int8_t* w, const float* scale, const float* sums_of_weights,
                             const float* bias, float* y, uint8_t* bytes, void* room, int64_t N, int64_t S, int64_t K,
                             int64_t C, int threads) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    Steps* steps = (Steps*)room;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < N * S; row++) steps[row] = to_bytes(x + row * K, K, bytes + row * K);
    const int64_t panels = (C + PANEL - 1) / PANEL;
    over_panels(N, S, C, BYTE_ROWS, threads, [=](int64_t n, int64_t p, int64_t row, int count, int width) {
        const int64_t first = p * PANEL, start = n * C + first;
        byte_rows(count, bytes + row * K, steps + row, w + (n * panels + p) * K * PANEL, K, scale + start,
                  sums_of_weights + start, bias + start, y + row * C + first, C, width);
    });
    return 1;
#else
    (void)x, (void)w, (void)scale, (void)sums_of_weights, (void)bias, (void)y, (void)bytes, (void)room;
    (void)N, (void)S, (void)K, (void)C, (void)threads;
    return 0;
#endif
}

#define EXPORT(NAME, TYPE)                                                                                         \
    extern "C" void NAME(const float* x, const void* w, const float* scale, const float* bias, float* y, int64_t N, \
                         int64_t S, int64_t K, int64_t C, int threads) {                                           \
        product<TYPE>(x, (const TYPE*)w, scale, bias, y, N, S, K, C, threads);                                     \
    }

EXPORT(product_float32, float)
EXPORT(product_float16, Float16)
EXPORT(product_bfloat16, BFloat16)
EXPORT(product_int8, int8_t)
