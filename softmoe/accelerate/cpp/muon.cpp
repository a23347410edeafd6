// One step of Muon on stacked matrices (softmoe/train/muon.py has the definition), each in one pass over memory.
//
// A matrix is seen as tall: L lines of M numbers, M <= L. All but the first and the last product are of polynomials of one
// symmetric (M, M) matrix, so they are symmetric too: half of each is computed, and the other half is its mirror image.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int TALL = REGISTERS == 32 ? 8 : 4;  // lines of a tile; it is up to three vectors wide

struct Settings {
    float keep, rate, momentum, a, b, c;
    int64_t steps;
};

// A matrix to be read: its numbers are `line` apart from line to line and `step` from one to the next in a line.
struct Factor {
    const float* at;
    int64_t line, step;
};

// `write` gets the place (line, column) and the vector of each sum of TALL lines of `x` times V vectors of `y`.
template <int V, class Write>
inline void tile(Factor x, const float* __restrict y, int64_t far, int64_t depth, int64_t top, int64_t left, Write write) {
    Floats sums[TALL][V];
    for (int r = 0; r < TALL; r++)
        for (int v = 0; v < V; v++) sums[r][v] = Floats{};
    const float* a = x.at + top * x.line;
    const float* b = y + left;
    for (int64_t k = 0; k < depth; k++, a += x.step, b += far) {
        Floats line[V];
        for (int v = 0; v < V; v++) line[v] = load(b + v * LANES);
        for (int r = 0; r < TALL; r++) {
            const Floats factor = same(a[r * x.line]);
            for (int v = 0; v < V; v++) sums[r][v] += factor * line[v];
        }
    }
    for (int r = 0; r < TALL; r++)
        for (int v = 0; v < V; v++) write(top + r, left + v * LANES, sums[r][v]);
}

// Lines `top` to top + TALL of the product of x and y (depth lines, `far` apart), the first `columns` of each.
template <class Write>
inline void lines(Factor x, const float* y, int64_t far, int64_t depth, int64_t top, int64_t columns, Write write) {
    for (int64_t left = 0; left < columns;) {
        const int64_t vectors = (columns - left) / LANES;
        const int wide = vectors == 1 ? 1 : vectors == 2 || vectors == 4 ? 2 : 3;
        if (wide == 1) tile<1>(x, y, far, depth, top, left, write);
        else if (wide == 2) tile<2>(x, y, far, depth, top, left, write);
        else tile<3>(x, y, far, depth, top, left, write);
        left += wide * LANES;
    }
}

// out = x y, where it is known to be symmetric, (M, M).
void symmetric(Factor x, const float* y, int64_t depth, float* out, int64_t M) {
    const auto keep = [&](int64_t r, int64_t c, Floats sums) { store(out + r * M + c, sums); };
    for (int64_t top = 0; top < M; top += TALL)  // up to the block of the diagonal
        lines(x, y, M, depth, top, top / LANES * LANES + LANES, keep);
    for (int64_t r = LANES; r < M; r += LANES) turn(out + r * M, M, LANES, r, out + r, M);
}

// step = a + b gram + c gram^2
void newton_schulz(const float* gram, float* step, int64_t M, const Settings& s) {
    symmetric({gram, M, 1}, gram, M, step, M);
    for (int64_t i = 0; i < M * M; i++) step[i] = s.b * gram[i] + s.c * step[i];
    for (int64_t i = 0; i < M; i++) step[i * M + i] += s.a;
}

// The working memory of a thread: `tall` is the direction of the step, (L, M), where M is a multiple of LANES and L of TALL;
// what a matrix lacks is zero.
struct Space {
    int64_t M;
    std::vector<float> direction, tall, block, gram, step, product, polynomial;

    void resize(int64_t L, int64_t M) {
        this->M = M;
        tall.assign((L + TALL - 1) / TALL * TALL * M, 0.0f);
        block.resize(TALL * M);
        for (auto* square : {&gram, &step, &product, &polynomial}) square->resize(M * M);
    }

    // The polynomial of gram by which Newton and Schulz multiply `tall`, times the rate.
    void find(int64_t L, const Settings& s) {
        symmetric({tall.data(), 1, M}, tall.data(), L, gram.data(), M);
        newton_schulz(gram.data(), step.data(), M, s);
        polynomial = step;
        for (int64_t i = 1; i < s.steps; i++) {
            symmetric({step.data(), M, 1}, gram.data(), M, product.data(), M);
            symmetric({product.data(), M, 1}, step.data(), M, gram.data(), M);
            newton_schulz(gram.data(), step.data(), M, s);
            symmetric({step.data(), M, 1}, polynomial.data(), M, product.data(), M);
            polynomial.swap(product);
        }
        for (float& value : polynomial) value *= s.rate;
    }
};

// The new momentum, and the direction of the step into `direction`; returns the sum of its squares.
double advance(float* __restrict momentum, const float* __restrict gradient, float* __restrict direction, int64_t count,
               float share) {
    double total = 0;
    for (int64_t start = 0; start < count; start += 4096) {
        const int64_t end = start + 4096 < count ? start + 4096 : count;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = start; i < end; i++) {
            momentum[i] = share * momentum[i] + gradient[i];
            direction[i] = gradient[i] + share * momentum[i];
            squares += direction[i] * direction[i];
        }
        total += squares;
    }
    return total;
}

void update(float* weight, const float* gradient, float* momentum, int64_t rows, int64_t columns, const Settings& s,
            Space& space) {
    const bool is_tall = rows >= columns;
    const int64_t L = is_tall ? rows : columns, few = is_tall ? columns : rows, M = (few + LANES - 1) / LANES * LANES;
    space.resize(L, M);
    space.direction.resize(rows * columns);
    float *direction = space.direction.data(), *tall = space.tall.data(), *block = space.block.data();
    const float norm = std::sqrt(advance(momentum, gradient, direction, rows * columns, s.momentum)) + 1e-7f;
    for (int64_t i = 0; i < rows * columns; i++) direction[i] /= norm;
    if (is_tall)
        for (int64_t l = 0; l < L; l++) std::memcpy(tall + l * M, direction + l * few, few * sizeof(float));
    else turn(direction, columns, rows, columns, tall, M);
    space.find(L, s);
    for (int64_t top = 0; top < L; top += TALL) {
        lines({tall + top * M, M, 1}, space.polynomial.data(), M, M, 0, M,
              [&](int64_t r, int64_t c, Floats sums) { store(block + r * M + c, sums); });
        const int64_t count = top + TALL < L ? TALL : L - top, line = is_tall ? columns : 1, next = is_tall ? 1 : columns;
        float* corner = weight + top * line;
        for (int64_t r = 0; r < count; r++)
            for (int64_t m = 0; m < few; m++) {
                float& w = corner[r * line + m * next];
                w = s.keep * w - block[r * M + m];
            }
    }
}

}  // namespace

// Of each of `count` matrices: the addresses of weight, gradient and momentum, its rows and columns, and three factors:
// 1 - rate * decay, the rate times Muon's factor for a matrix of its size, and the share of the momentum that is kept.
extern "C" void muon_step(const int64_t* addresses, const int64_t* sizes, const float* factors, int64_t count, float a,
                          float b, float c, int64_t steps, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Space space;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            float* at[3];
            for (int k = 0; k < 3; k++) at[k] = reinterpret_cast<float*>(addresses[3 * i + k]);
            const float* factor = factors + 3 * i;
            const Settings settings = {factor[0], factor[1], factor[2], a, b, c, steps};
            update(at[0], at[1], at[2], sizes[2 * i], sizes[2 * i + 1], settings, space);
        }
    }
}
