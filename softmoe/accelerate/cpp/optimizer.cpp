// One step of AdamW on float32 weights whose two moments are kept in bfloat16, in one pass over memory: 20 bytes a
// weight. The first moment is rounded to the nearest number, the second up or down by the random numbers in `noise`.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t CHUNK = 1 << 14;  // weights that a thread takes at a time

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Settings {
    float keep, beta1, rest1, beta2, rest2, step, root, eps;
};

void update(float* __restrict weight, const float* __restrict gradient, uint16_t* __restrict first,
            uint16_t* __restrict second, const uint32_t* __restrict noise, int64_t count, Settings s) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const float g = gradient[i];
        const float m = float_of((uint32_t)first[i] << 16) * s.beta1 + g * s.rest1;
        const float v = float_of((uint32_t)second[i] << 16) * s.beta2 + g * g * s.rest2;
        weight[i] = weight[i] * s.keep - s.step * m / (std::sqrt(v) * s.root + s.eps);
        const uint32_t bits = bits_of(m);
        first[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        second[i] = (uint16_t)((bits_of(v) + noise[i]) >> 16);
    }
}

}  // namespace

// `noise` holds `piece` + `shifts` numbers of 16 bits; each piece of the weights begins at a place of its own in it, given
// by the step, the number of the parameter and that of the piece. keep is 1 - rate * decay, step the rate over the first
// moment's bias correction, root one over the square root of the second's.
extern "C" void adamw(float* weight, const float* gradient, uint16_t* first, uint16_t* second, const uint32_t* noise,
                      int64_t count, int64_t piece, int64_t shifts, int64_t number_of_step, int64_t parameter, float keep,
                      float beta1, float beta2, float step, float root, float eps, int threads) {
    const Settings settings = {keep, beta1, 1 - beta1, beta2, 1 - beta2, step, root, eps};
    const int64_t chunk = piece % CHUNK ? piece : CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t start = 0; start < count; start += chunk) {
        const uint64_t place = start / piece;
        const uint64_t seed = number_of_step * 0x9E3779B1ull + parameter * 0x85EBCA77ull + place * 0xC2B2AE3Dull;
        const uint32_t* from = noise + seed / 64 % shifts + start % piece;
        const int64_t length = count - start < chunk ? count - start : chunk;
        update(weight + start, gradient + start, first + start, second + start, from, length, settings);
    }
}
