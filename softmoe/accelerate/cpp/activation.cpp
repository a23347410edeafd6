// GELU in its tanh form, x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), and its gradient: one exponential a number.
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

constexpr float SLOPE = 2 * 0.7978845608028654f, CUBE = 0.044715f;

inline Floats gate(Floats x) { return 1.0f / (1.0f + exponential(-SLOPE * x * (1.0f + CUBE * x * x))); }

inline Floats forward(Floats x) { return x * gate(x); }

inline Floats backward(Floats x, Floats dy) {
    const Floats g = gate(x);
    return dy * g * (1.0f + (1.0f - g) * SLOPE * x * (1.0f + 3.0f * CUBE * x * x));
}

// The numbers after the last whole vector, filled up with zeros.
inline Floats load_rest(const float* p, int64_t count) {
    Floats values = {};
    std::memcpy(&values, p, count * sizeof(float));
    return values;
}

}  // namespace

extern "C" {

void gelu(const float* x, float* y, int64_t count, int threads) {
    const int64_t whole = count / LANES * LANES, rest = count - whole;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < whole; i += LANES) store(y + i, forward(load(x + i)));
    const Floats last = forward(load_rest(x + whole, rest));
    std::memcpy(y + whole, &last, rest * sizeof(float));
}

void gelu_backward(const float* x, const float* dy, float* dx, int64_t count, int threads) {
    const int64_t whole = count / LANES * LANES, rest = count - whole;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < whole; i += LANES) store(dx + i, backward(load(x + i), load(dy + i)));
    const Floats last = backward(load_rest(x + whole, rest), load_rest(dy + whole, rest));
    std::memcpy(dx + whole, &last, rest * sizeof(float));
}
}
