// The frame of each image and the places of slots in it (softmoe/moe/placed.py has the definition), added to the logits.
//
// Letters: B images, M tokens, D width, S slots. A place is (row, column).
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

struct Sizes {
    int64_t M, D, S;
    float eps, sharpness, least;
};

// The frame of one image, and what its gradient needs again.
struct Frame {
    std::vector<float> inverse, along, weight;  // of each token: 1 / length, unit vector times direction, share
    float middle[2], scale, whole;

    explicit Frame(int64_t M) : inverse(M), along(M), weight(M) {}

    float apart(const float* place, int64_t m, int axis) const { return place[2 * m + axis] - middle[axis]; }

    float in_frame(const float* place, int64_t m, int axis) const { return 0.5f + apart(place, m, axis) * scale; }

    void find(const float* x, const float* direction, const float* place, const Sizes& n) {
        float most = -INFINITY;
        for (int64_t m = 0; m < n.M; m++) {
            const float* token = x + m * n.D;
            float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
            for (int64_t d = 0; d < n.D; d++) {
                squares += token[d] * token[d];
                dot += token[d] * direction[d];
            }
            inverse[m] = 1.0f / std::sqrt(squares + n.eps);
            along[m] = inverse[m] * dot;
            most = std::max(most, n.sharpness * along[m]);
        }
        float total = 0, spread = 0;
        middle[0] = middle[1] = whole = 0;
        for (int64_t m = 0; m < n.M; m++) total += weight[m] = std::exp(n.sharpness * along[m] - most);
        for (int64_t m = 0; m < n.M; m++) {
            weight[m] /= total;
            for (int axis = 0; axis < 2; axis++) {
                middle[axis] += weight[m] * place[2 * m + axis];
                whole += (place[2 * m + axis] - 0.5f) * (place[2 * m + axis] - 0.5f);
            }
        }
        whole = std::max(whole / n.M, n.eps);
        for (int64_t m = 0; m < n.M; m++)
            for (int axis = 0; axis < 2; axis++) spread += weight[m] * apart(place, m, axis) * apart(place, m, axis);
        scale = 1.0f / std::sqrt((spread / whole + n.least) / (1.0f + n.least));
    }
};

}  // namespace

extern "C" {

// `center` has all rows, then all columns; `sharp` is 1 / width^2 of each slot.
void add_places(const float* logits, const float* x, const float* direction, const float* place, const float* center,
                const float* sharp, float* out, int64_t B, int64_t M, int64_t D, int64_t S, float eps,
                float sharpness, float least, int threads) {
    const Sizes n{M, D, S, eps, sharpness, least};
#pragma omp parallel num_threads(threads)
    {
        Frame frame(M);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            frame.find(x + b * M * D, direction, place, n);
            for (int64_t m = 0; m < M; m++) {
                const float row = frame.in_frame(place, m, 0), column = frame.in_frame(place, m, 1);
                const float* from = logits + (b * M + m) * S;
                float* to = out + (b * M + m) * S;
#pragma omp simd
                for (int64_t s = 0; s < S; s++) {
                    const float y = row - center[s], z = column - center[S + s];
                    to[s] = from[s] - (y * y + z * z) * sharp[s];
                }
            }
        }
    }
}

// Each image writes its part of the small gradients: rows and columns of the centers, log-widths, direction.
void add_places_backward(const float* dout, const float* x, const float* direction, const float* place,
                         const float* center, const float* sharp, float* dx, float* dsmall, int64_t B, int64_t M,
                         int64_t D, int64_t S, float eps, float sharpness, float least, int threads) {
    const Sizes n{M, D, S, eps, sharpness, least};
#pragma omp parallel num_threads(threads)
    {
        Frame frame(M);
        std::vector<float> dplace(2 * M), dweight(M);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            frame.find(x + b * M * D, direction, place, n);
            float *drow = dsmall + b * (3 * S + D), *dcolumn = drow + S, *dwidth = dcolumn + S, *dtoward = dwidth + S;
            for (int64_t i = 0; i < 3 * S + D; i++) drow[i] = 0;
            float dmiddle[2] = {0, 0}, dscale = 0;
            for (int64_t m = 0; m < M; m++) {
                const float row = frame.in_frame(place, m, 0), column = frame.in_frame(place, m, 1);
                const float* d = dout + (b * M + m) * S;
                float to_row = 0, to_column = 0;
#pragma omp simd reduction(+ : to_row, to_column)
                for (int64_t s = 0; s < S; s++) {
                    const float y = row - center[s], z = column - center[S + s], slope = 2 * d[s] * sharp[s];
                    to_row -= slope * y;
                    to_column -= slope * z;
                    drow[s] += slope * y;
                    dcolumn[s] += slope * z;
                    dwidth[s] += slope * (y * y + z * z);
                }
                dplace[2 * m] = to_row;
                dplace[2 * m + 1] = to_column;
                for (int axis = 0; axis < 2; axis++) {
                    dmiddle[axis] -= frame.scale * dplace[2 * m + axis];
                    dscale += dplace[2 * m + axis] * frame.apart(place, m, axis);
                }
            }
            // scale = ((spread + least) / (1 + least))^(-1/2); the spread does not change with the middle
            const float dspread =
                -0.5f * dscale * frame.scale * frame.scale * frame.scale / ((1.0f + least) * frame.whole);
            float mean = 0;
            for (int64_t m = 0; m < M; m++) {
                dweight[m] = 0;
                for (int axis = 0; axis < 2; axis++) {
                    const float apart = frame.apart(place, m, axis);
                    dweight[m] += dspread * apart * apart + dmiddle[axis] * place[2 * m + axis];
                }
                mean += frame.weight[m] * dweight[m];
            }
            for (int64_t m = 0; m < M; m++) {
                const float dalong = sharpness * frame.weight[m] * (dweight[m] - mean);
                const float inverse = frame.inverse[m], along = frame.along[m];
                const float* token = x + (b * M + m) * D;
                float* to = dx + (b * M + m) * D;
#pragma omp simd
                for (int64_t d = 0; d < D; d++) {
                    const float unit = inverse * token[d];
                    to[d] = dalong * inverse * (direction[d] - along * unit);
                    dtoward[d] += dalong * unit;
                }
            }
        }
    }
}
}
