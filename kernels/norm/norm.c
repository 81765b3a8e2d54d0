/* y = w x / sqrt(mean(x^2) + eps) over the last dimension, forward and backward, row by row: a row stays in the core's
cache between its passes. Called through ctypes (dispatch.py). */

#include "../vector.h"

/* block: rows per block. Gradients of w are summed per block, so that they do not depend on the number of threads. */
typedef struct {
    int64_t rows, width, block;
    double eps;
} Call;

INLINE int64_t end_of(const Call *call, int64_t block) {
    int64_t end = (block + 1) * call->block;
    return end < call->rows ? end : call->rows;
}

/* x (rows, width), w (width) -> y (rows, width). Blocks first .. last - 1. */
int forward(const Call *call, const real *x, const real *w, real *y, int64_t first, int64_t last) {
    int64_t D = call->width;
    for (int64_t row = first * call->block, end = end_of(call, last - 1); row < end; row++) {
        const real *in = x + row * D;
        real *out = y + row * D, scale = 1 / sqrt(dot(in, in, D) / D + call->eps);
        for (int64_t i = 0; i < D; i++) out[i] = w[i] * (in[i] * scale);
    }
    return 0;
}

/* d_y -> d_x (rows, width), d_w (blocks, width); ``work`` holds (blocks, width) numbers. */
int backward(const Call *call, const real *x, const real *w, const real *d_y, real *d_x, real *d_w, real *work,
             int64_t first, int64_t last) {
    int64_t D = call->width;
    for (int64_t block = first; block < last; block++) {
        real *of_w = d_w + block * D, *part = work + block * D;
        for (int64_t i = 0; i < D; i++) of_w[i] = 0;
        for (int64_t row = block * call->block; row < end_of(call, block); row++) {
            const real *in = x + row * D, *given = d_y + row * D;
            real scale = 1 / sqrt(dot(in, in, D) / D + call->eps), *out = d_x + row * D;
            for (int64_t i = 0; i < D; i++) {
                of_w[i] += given[i] * (in[i] * scale);
                part[i] = given[i] * w[i];
            }
            real along = dot(part, in, D) * scale * scale / D;
            for (int64_t i = 0; i < D; i++) out[i] = (part[i] - in[i] * along) * scale;
        }
    }
    return 0;
}
