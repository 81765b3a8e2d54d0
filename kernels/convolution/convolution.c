/* The causal depthwise convolution of a few taps, forward and backward, a vector of channels at a time: each number is
read and written once. Called through ctypes (__init__.py). */

#include "../vector.h"

#define MAX_WIDTH 16

typedef struct {
    int64_t batch, tokens, channels, width;
} Call;

/* Of ``count`` <= LANES channels. */
INLINE vec load(const real *p, int count) {
    if (count == LANES) return CONST_AT(p, 0);
    vec x = {0};
    memcpy(&x, p, count * sizeof(real));
    return x;
}

INLINE void store(real *p, vec x, int count) {
    if (count == LANES)
        AT(p, 0) = x;
    else
        memcpy(p, &x, count * sizeof(real));
}

/* x, y (batch, tokens, channels); past (batch, width - 1, channels), the inputs before them; taps (width, channels), the
newest token's last; bias (channels) or NULL. Blocks first .. last - 1 of LANES channels. */
int forward(const Call *call, const real *x, const real *past, const real *taps, const real *bias, real *y,
            int64_t first, int64_t last) {
    int64_t D = call->channels, T = call->tokens, before = call->width - 1;
    for (int64_t at = first * LANES; at < last * LANES && at < D; at += LANES) {
        int count = D - at < LANES ? D - at : LANES;
        vec tap[MAX_WIDTH], seen[MAX_WIDTH], start = {0};
        for (int i = 0; i <= before; i++) tap[i] = load(taps + i * D + at, count);
        if (bias) start = load(bias + at, count);
        for (int64_t b = 0; b < call->batch; b++) {
            for (int i = 0; i < before; i++) seen[i] = load(past + (b * before + i) * D + at, count);
            for (int64_t t = 0; t < T; t++) {
                seen[before] = load(x + (b * T + t) * D + at, count);
                vec sum = start;
                for (int i = 0; i <= before; i++) sum += tap[i] * seen[i];
                store(y + (b * T + t) * D + at, sum, count);
                for (int i = 0; i < before; i++) seen[i] = seen[i + 1];
            }
        }
    }
    return 0;
}

/* d_y -> d_x, d_past, d_taps, d_bias (NULL without a bias). */
int backward(const Call *call, const real *x, const real *past, const real *taps, const real *d_y, real *d_x,
             real *d_past, real *d_taps, real *d_bias, int64_t first, int64_t last) {
    int64_t D = call->channels, T = call->tokens, before = call->width - 1;
    for (int64_t at = first * LANES; at < last * LANES && at < D; at += LANES) {
        int count = D - at < LANES ? D - at : LANES;
        vec tap[MAX_WIDTH], of_tap[MAX_WIDTH] = {{0}}, of_bias = {0}, seen[MAX_WIDTH], pending[MAX_WIDTH];
        for (int i = 0; i <= before; i++) tap[i] = load(taps + i * D + at, count);
        for (int64_t b = 0; b < call->batch; b++) {
            /* pending[i]: what outputs so far say about the input i places after the oldest one in sight. */
            for (int i = 0; i <= before; i++) pending[i] = (vec){0};
            for (int i = 0; i < before; i++) seen[i] = load(past + (b * before + i) * D + at, count);
            for (int64_t t = 0; t < T + before; t++) {
                vec d = {0};
                if (t < T) {
                    d = load(d_y + (b * T + t) * D + at, count);
                    seen[before] = load(x + (b * T + t) * D + at, count);
                    for (int i = 0; i <= before; i++) {
                        of_tap[i] += d * seen[i];
                        pending[i] += d * tap[i];
                    }
                    of_bias += d;
                    for (int i = 0; i < before; i++) seen[i] = seen[i + 1];
                }
                real *to = t < before ? d_past + (b * before + t) * D : d_x + (b * T + t - before) * D;
                store(to + at, pending[0], count);
                for (int i = 0; i < before; i++) pending[i] = pending[i + 1];
                pending[before] = (vec){0};
            }
        }
        for (int i = 0; i <= before; i++) store(d_taps + i * D + at, of_tap[i], count);
        if (d_bias) store(d_bias + at, of_bias, count);
    }
    return 0;
}
