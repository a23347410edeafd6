// What the compiled passes have in common: a vector of numbers, as wide as the processor's, how many
// of them it holds, the exponential, and the transpose of a matrix.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));

typedef Floats Anywhere __attribute__((aligned(4), may_alias));  // in memory

inline Floats load(const float* p) { return *reinterpret_cast<const Anywhere*>(p); }

inline void store(float* p, Floats values) { *reinterpret_cast<Anywhere*>(p) = values; }

// Past the caches: a gradient is next read when they have long forgotten it.
inline void store_far(float* p, Floats values) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)values);
#elif defined(__AVX__)
    _mm256_stream_ps(p, (__m256)values);
#elif defined(__x86_64__)
    _mm_stream_ps(p, (__m128)values);
#else
    store(p, values);
#endif
}

inline void end_of_far_stores() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

inline Floats same(float value) { return value - Floats{}; }  // one load: adding zero would not be (-0 + 0 is 0)

inline float sum(Floats values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)values);
#else
    float parts[LANES];
    std::memcpy(parts, &values, sizeof values);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
#endif
}

typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

// Within two units of the last place. Above 88 it is that of 88, below -87 zero: the exact one is no normal number there.
inline Floats exponential(Floats x) {
    const Ints tiny = x < -87.0f;
    x = tiny ? same(-87.0f) : x;
    x = x > 88.0f ? same(88.0f) : x;
    constexpr float ROUND = 12582912.0f;  // added and taken away, it leaves a whole number
    const Floats n = (x * 1.44269504f + ROUND) - ROUND;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log 2 in two parts: the first product is exact
    Floats p = same(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    return tiny ? Floats{} : p * (Floats)bits;
}

// (rows, columns) -> (columns, rows); `stride` and `to_stride` are the distances of their lines.
inline void turn(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
    int64_t r = 0;
#if defined(__x86_64__)
    for (; r + 4 <= rows; r += 4) {
        int64_t c = 0;
        for (; c + 4 <= columns; c += 4) {
            __m128 lines[4];
            for (int i = 0; i < 4; i++) lines[i] = _mm_loadu_ps(from + (r + i) * stride + c);
            _MM_TRANSPOSE4_PS(lines[0], lines[1], lines[2], lines[3]);
            for (int i = 0; i < 4; i++) _mm_storeu_ps(to + (c + i) * to_stride + r, lines[i]);
        }
        for (; c < columns; c++)
            for (int i = 0; i < 4; i++) to[c * to_stride + r + i] = from[(r + i) * stride + c];
    }
#endif
    for (; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) to[c * to_stride + r] = from[r * stride + c];
}
