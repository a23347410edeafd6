// Scenes of `shapes`, picture by picture: the arithmetic of shapes_draw.py operation by operation, so that the bytes
// are the same. To be compiled without contraction: a * b + c is rounded twice.
//
// The structures are those of shapes_draw.py too. `line` has the places of columns, and of rows upside down.
#include <omp.h>

#include <cstdint>

namespace {

constexpr int CELLS = 256, NOISE = 1 << 16, MOST = 512;

// Where a pixel lies in a table: u = (ux x + u0) + uy y, v = (vx x + v0) + vy y.
struct Frame {
    float ux, u0, uy, vx, v0, vy;

    float u(float x, float y) const { return (ux * x + u0) + uy * y; }
    float v(float x, float y) const { return (vx * x + v0) + vy * y; }
};

struct Placed {
    Frame frame;
    float color[3], pixels;  // pixels: of a unit of the distance table
    int32_t table, rows[2], columns[2];  // the part of the picture that it may touch, without the last
};

struct Texture {  // a share of a second color: by a table, or within the rim
    Frame frame;
    float added[3], rim;
    int32_t table, rimmed;
};

struct Scene {
    double down, across, zoom;
    int32_t ground, noise;
    float light[3], strength;
};

inline float held(float value, float top) {
    value = value > 0.0f ? value : 0.0f;
    return value < top ? value : top;
}

inline float coverage(float distance) { return held(0.5f - distance, 1.0f); }

// The share of the second color in a row of pixels that begins at x[0].
void textured(const Texture& it, const float* textures, const float* x, float y, const float* distance, int width,
              float* share) {
    if (it.rimmed) {
        for (int k = 0; k < width; k++) share[k] = coverage(-it.rim - distance[k]);
        return;
    }
    const float* table = textures + int64_t(it.table) * CELLS * CELLS;
    for (int k = 0; k < width; k++) {
        const int u = int(it.frame.u(x[k], y)) & (CELLS - 1), v = int(it.frame.v(x[k], y)) & (CELLS - 1);
        share[k] = table[v * CELLS + u];
    }
}

void paint(const Placed& it, const Texture* texture, const float* distances, const float* textures, const float* line,
           int64_t size, float* planes) {
    const float* table = distances + int64_t(it.table) * CELLS * CELLS;
    const float* x = line + it.columns[0];
    const int width = it.columns[1] - it.columns[0];
    float distance[MOST], cover[MOST], share[MOST];
    for (int64_t row = it.rows[0]; row < it.rows[1]; row++) {
        const float y = -line[row];
        for (int k = 0; k < width; k++) {
            const int u = int(held(it.frame.u(x[k], y), CELLS - 1)), v = int(held(it.frame.v(x[k], y), CELLS - 1));
            distance[k] = table[v * CELLS + u] * it.pixels;
            cover[k] = coverage(distance[k]);
        }
        if (texture) textured(*texture, textures, x, y, distance, width, share);
        for (int c = 0; c < 3; c++) {
            float* there = planes + (c * size + row) * size + it.columns[0];
            const float color = it.color[c], added = texture ? texture->added[c] : 0.0f;
            if (texture)
                for (int k = 0; k < width; k++) there[k] += cover[k] * ((color + share[k] * added) - there[k]);
            else
                for (int k = 0; k < width; k++) there[k] += cover[k] * (color - there[k]);
        }
    }
}

void lay_ground(const Scene& it, const float* grounds, int64_t kinds, int64_t size, float* planes) {
    const double step = 128.0 / double(size);  // a picture shows half a tile at zoom 1
    int32_t columns[MOST];
    for (int64_t k = 0; k < size; k++) columns[k] = int32_t(it.across + double(k) * step * it.zoom) & (CELLS - 1);
    for (int64_t row = 0; row < size; row++) {
        const int64_t from = int64_t(it.down + double(row) * step * it.zoom) & (CELLS - 1);
        for (int64_t c = 0; c < 3; c++) {
            const float* tile = grounds + ((c * kinds + it.ground) * CELLS + from) * CELLS;
            float* there = planes + (c * size + row) * size;
            for (int64_t k = 0; k < size; k++) there[k] = tile[columns[k]];
        }
    }
}

// `noise` goes on for a row beyond its end, as it begins.
void light_and_noise(const Scene& it, const float* noise, const float* line, int64_t size, const float* planes,
                     uint8_t* picture) {
    const float gain = it.light[0], across = it.light[1], up = it.light[2];
    for (int64_t c = 0; c < 3; c++)
        for (int64_t row = 0; row < size; row++) {
            const float* grain = noise + ((it.noise + c * 7919 + row * size) & (NOISE - 1));
            const float* there = planes + (c * size + row) * size;
            const float slope = up * line[row];
            for (int64_t k = 0; k < size; k++) {
                const float light = gain * ((1.0f + across * line[k]) - slope);
                picture[(row * size + k) * 3 + c] = uint8_t(held(there[k] * light + grain[k] * it.strength, 255.0f));
            }
        }
}

}  // namespace

// `layers` objects of each picture, from back to front, all pictures of one after the other; that number `main` has
// the texture. There is room for 3 x size x size numbers of every thread.
extern "C" void draw(const Scene* scenes, const Placed* placed, const Texture* textures, int64_t count, int64_t layers,
                     int64_t main, int64_t size, const float* line, const float* grounds, int64_t kinds,
                     const float* distance_table, const float* texture_table, const float* noise, float* room,
                     uint8_t* pictures, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t b = 0; b < count; b++) {
        float* planes = room + omp_get_thread_num() * 3 * size * size;
        lay_ground(scenes[b], grounds, kinds, size, planes);
        for (int64_t layer = 0; layer < layers; layer++)
            paint(placed[layer * count + b], layer == main ? textures + b : nullptr, distance_table, texture_table,
                  line, size, planes);
        light_and_noise(scenes[b], noise, line, size, planes, pictures + b * size * size * 3);
    }
}
