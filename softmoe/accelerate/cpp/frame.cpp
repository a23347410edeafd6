// The frame of each image and the places of slots in it (softmoe/moe/placed.py has the definition), added to the logits.
//
// Letters: B images, M tokens, D width, S slots. A place is (row, column).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

// What all images share: the places of tokens, and centers and 1 / width^2 of slots, rows and columns by themselves.
struct Shared {
    int64_t M, D, S;
    float eps, sharpness, least, whole;
    const float* direction;
    std::vector<float> row, column, center_row, center_column, sharp;

    Shared(const float* direction, const float* center, const float* log_width, int64_t rows, int64_t columns,
           int64_t D, int64_t S, float eps, float sharpness, float least)
        : M(rows * columns), D(D), S(S), eps(eps), sharpness(sharpness), least(least), whole(0), direction(direction),
          row(M), column(M), center_row(S), center_column(S), sharp(S) {
        for (int64_t m = 0; m < M; m++) {
            row[m] = (m / columns + 0.5f) / rows;
            column[m] = (m % columns + 0.5f) / columns;
            whole += (row[m] - 0.5f) * (row[m] - 0.5f) + (column[m] - 0.5f) * (column[m] - 0.5f);
        }
        whole = std::max(whole / M, eps);
        for (int64_t s = 0; s < S; s++) {
            center_row[s] = center[2 * s];
            center_column[s] = center[2 * s + 1];
            sharp[s] = std::exp(-2 * log_width[s]);
        }
    }
};

// The frame of one image, and what its gradient needs again.
struct Frame {
    const Shared& n;
    std::vector<float> inverse, along, weight;  // of each token: 1 / length, unit vector times direction, share
    float middle_row, middle_column, scale;

    explicit Frame(const Shared& n) : n(n), inverse(n.M), along(n.M), weight(n.M) {}

    float down(int64_t m) const { return n.row[m] - middle_row; }
    float right(int64_t m) const { return n.column[m] - middle_column; }

    void find(const float* x) {
        float most = -INFINITY;
        for (int64_t m = 0; m < n.M; m++) {
            const float* token = x + m * n.D;
            float squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
            for (int64_t d = 0; d < n.D; d++) {
                squares += token[d] * token[d];
                dot += token[d] * n.direction[d];
            }
            inverse[m] = 1.0f / std::sqrt(squares + n.eps);
            along[m] = inverse[m] * dot;
            most = std::max(most, n.sharpness * along[m]);
        }
        float total = 0, spread = 0;
        middle_row = middle_column = 0;
        for (int64_t m = 0; m < n.M; m++) total += weight[m] = std::exp(n.sharpness * along[m] - most);
        for (int64_t m = 0; m < n.M; m++) {
            weight[m] /= total;
            middle_row += weight[m] * n.row[m];
            middle_column += weight[m] * n.column[m];
        }
        for (int64_t m = 0; m < n.M; m++) spread += weight[m] * (down(m) * down(m) + right(m) * right(m));
        scale = 1.0f / std::sqrt((spread / n.whole + n.least) / (1.0f + n.least));
    }
};

}  // namespace

extern "C" {

void add_places(const float* logits, const float* x, const float* direction, const float* center,
                const float* log_width, float* out, int64_t B, int64_t rows, int64_t columns, int64_t D, int64_t S,
                float eps, float sharpness, float least, int threads) {
    const Shared n(direction, center, log_width, rows, columns, D, S, eps, sharpness, least);
#pragma omp parallel num_threads(threads)
    {
        Frame frame(n);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            frame.find(x + b * n.M * D);
            for (int64_t m = 0; m < n.M; m++) {
                const float row = 0.5f + frame.down(m) * frame.scale, column = 0.5f + frame.right(m) * frame.scale;
                const float* from = logits + (b * n.M + m) * S;
                float* to = out + (b * n.M + m) * S;
#pragma omp simd
                for (int64_t s = 0; s < S; s++) {
                    const float y = row - n.center_row[s], z = column - n.center_column[s];
                    to[s] = from[s] - (y * y + z * z) * n.sharp[s];
                }
            }
        }
    }
}

// The gradients of tokens, direction, centers and log-widths. Images are added up in their order, whatever the threads.
void add_places_backward(const float* dout, const float* x, const float* direction, const float* center,
                         const float* log_width, float* dx, float* ddirection, float* dcenter, float* dlog_width,
                         int64_t B, int64_t rows, int64_t columns, int64_t D, int64_t S, float eps, float sharpness,
                         float least, int threads) {
    const Shared n(direction, center, log_width, rows, columns, D, S, eps, sharpness, least);
    const int64_t M = n.M, parts = 3 * S + D;
    std::vector<float> of_image(B * parts);
#pragma omp parallel num_threads(threads)
    {
        Frame frame(n);
        std::vector<float> dweight(M);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; b++) {
            frame.find(x + b * M * D);
            float *drow = &of_image[b * parts], *dcolumn = drow + S, *dwidth = dcolumn + S, *dtoward = dwidth + S;
            float dmiddle_row = 0, dmiddle_column = 0, dscale = 0;
            for (int64_t m = 0; m < M; m++) {
                const float row = 0.5f + frame.down(m) * frame.scale, column = 0.5f + frame.right(m) * frame.scale;
                const float* d = dout + (b * M + m) * S;
                float to_row = 0, to_column = 0;
#pragma omp simd reduction(+ : to_row, to_column)
                for (int64_t s = 0; s < S; s++) {
                    const float y = row - n.center_row[s], z = column - n.center_column[s];
                    const float slope = 2 * d[s] * n.sharp[s];
                    to_row -= slope * y;
                    to_column -= slope * z;
                    drow[s] += slope * y;
                    dcolumn[s] += slope * z;
                    dwidth[s] += slope * (y * y + z * z);
                }
                dmiddle_row -= frame.scale * to_row;
                dmiddle_column -= frame.scale * to_column;
                dscale += to_row * frame.down(m) + to_column * frame.right(m);
            }
            // scale = ((spread + least) / (1 + least))^(-1/2); the spread does not change with the middle
            const float cubed = frame.scale * frame.scale * frame.scale;
            const float dspread = -0.5f * dscale * cubed / ((1.0f + least) * n.whole);
            float mean = 0;
            for (int64_t m = 0; m < M; m++) {
                const float apart = frame.down(m) * frame.down(m) + frame.right(m) * frame.right(m);
                dweight[m] = dspread * apart + dmiddle_row * n.row[m] + dmiddle_column * n.column[m];
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
    std::vector<float> sum(parts);
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < parts; i++) sum[i] += of_image[b * parts + i];
    for (int64_t s = 0; s < S; s++) {
        dcenter[2 * s] = sum[s];
        dcenter[2 * s + 1] = sum[S + s];
        dlog_width[s] = sum[2 * S + s];
    }
    std::copy(sum.begin() + 3 * S, sum.end(), ddirection);
}
}
