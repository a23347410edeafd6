// GELU in its tanh form, x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), and its gradient: one exponential a number, in
// loops that a compiler turns into vectors.
#include <cstdint>

#include "vectors.h"

namespace {

constexpr float SLOPE = 2 * 0.7978845608028654f, CUBE = 0.044715f;

inline float gate(float x) { return 1.0f / (1.0f + exponential(-SLOPE * x * (1.0f + CUBE * x * x))); }

}  // namespace

extern "C" {

void gelu(const float* x, float* y, int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) y[i] = x[i] * gate(x[i]);
}

void gelu_backward(const float* x, const float* dy, float* dx, int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; i++) {
        const float g = gate(x[i]);
        dx[i] = dy[i] * g * (1.0f + (1.0f - g) * SLOPE * x[i] * (1.0f + 3.0f * CUBE * x[i] * x[i]));
    }
}
}
