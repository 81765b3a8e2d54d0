/* The causal depthwise convolution of a few taps with the usual steps after it (SiLU, heads of unit length), forward and
backward: each number is read and written once or twice. Called through ctypes (dispatch.py). */

#include "../vector.h"

typedef struct {
    int64_t batch, tokens, channels, width;
    int64_t silu;
    int64_t unit; /* channels per head that is normalised to unit length; 0: no heads */
} Call;

/* Channels of a group: a head of unit length, or 64 bytes on every machine, because the caller counts the groups. */
INLINE int64_t group(const Call *call) { return call->unit ? call->unit : 64 / (int64_t)sizeof(real); }

/* x (batch, tokens, channels); past (batch, width - 1, channels), the inputs before it; taps (width, channels), the newest
token's last; bias (channels) or NULL; reach (batch, tokens): how many earlier inputs each token sees, or NULL: all. */
typedef struct {
    const real *x, *past, *taps, *bias;
    const int64_t *reach;
} Inputs;

/* The input ``lag`` tokens before token t of row b, from channel ``at`` on. */
INLINE const real *input(const Call *call, const Inputs *in, int64_t b, int64_t t, int64_t lag, int64_t at) {
    int64_t before = call->width - 1, row = t - lag;
    if (row >= 0) return in->x + (b * call->tokens + row) * call->channels + at;
    return in->past + (b * before + before + row) * call->channels + at;
}

INLINE int64_t lags(const Call *call, const Inputs *in, int64_t b, int64_t t) {
    return in->reach ? in->reach[b * call->tokens + t] : call->width - 1;
}

/* The convolution at token t. */
INLINE vec convolved(const Call *call, const Inputs *in, int64_t b, int64_t t, int64_t at, int count) {
    vec y = {0};
    if (in->bias) y = load(in->bias + at, count);
    for (int64_t lag = lags(call, in, b, t); lag >= 0; lag--)
        y += load(in->taps + (call->width - 1 - lag) * call->channels + at, count) *
             load(input(call, in, b, t, lag, at), count);
    return y;
}

/* -> y (batch, tokens, channels). Groups first .. last - 1. */
int forward(const Call *call, const Inputs *in, real *y, int64_t first, int64_t last) {
    int64_t D = call->channels, G = group(call);
    for (int64_t g = first; g < last; g++) {
        int64_t end = (g + 1) * G < D ? (g + 1) * G : D;
        for (int64_t b = 0; b < call->batch; b++)
            for (int64_t t = 0; t < call->tokens; t++) {
                real *out = y + (b * call->tokens + t) * D;
                vec squares = {0};
                for (int64_t at = g * G; at < end; at += LANES) {
                    int count = width_at(at, end);
                    vec c = convolved(call, in, b, t, at, count);
                    if (call->silu) c *= share(c);
                    squares += c * c;
                    store(out + at, c, count);
                }
                if (!call->unit) continue;
                real length = sqrt(sum(squares)), scale = 1 / (length > SMALLEST ? length : SMALLEST);
                for (int64_t at = g * G; at < end; at += LANES) {
                    int count = width_at(at, end);
                    store(out + at, load(out + at, count) * scale, count);
                }
            }
    }
    return 0;
}

/* d_y -> d_x, d_past, d_taps, d_bias (NULL without a bias); the last two must hold zeros before the call. */
int backward(const Call *call, const Inputs *in, const real *d_y, real *d_x, real *d_past, real *d_taps, real *d_bias,
             int64_t first, int64_t last) {
    int64_t D = call->channels, T = call->tokens, G = group(call), before = call->width - 1;
    for (int64_t g = first; g < last; g++) {
        int64_t begin = g * G, end = begin + G < D ? begin + G : D;
        for (int64_t b = 0; b < call->batch; b++) {
            /* d_x holds the gradient of the convolution's output first; the gradient of x replaces it below. */
            for (int64_t t = 0; t < T; t++) {
                const real *given = d_y + (b * T + t) * D;
                real *d = d_x + (b * T + t) * D, scale = 1, along = 0;
                if (call->unit) {
                    vec squares = {0}, product = {0};
                    for (int64_t at = begin; at < end; at += LANES) {
                        int count = width_at(at, end);
                        vec c = convolved(call, in, b, t, at, count);
                        if (call->silu) c *= share(c);
                        squares += c * c;
                        product += c * load(given + at, count);
                    }
                    real length = sqrt(sum(squares));
                    scale = 1 / (length > SMALLEST ? length : SMALLEST);
                    if (length > SMALLEST) along = sum(product) * scale * scale * scale;
                }
                for (int64_t at = begin; at < end; at += LANES) {
                    int count = width_at(at, end);
                    vec d_c = load(given + at, count);
                    if (call->silu || call->unit) {
                        vec c = convolved(call, in, b, t, at, count), part = {0}, slope = part + 1, y = c;
                        if (call->silu) {
                            part = share(c);
                            y = c * part;
                            slope = part * (1 + c * (1 - part));
                        }
                        d_c = (d_c * scale - y * along) * slope;
                    }
                    for (int64_t lag = lags(call, in, b, t); lag >= 0; lag--) {
                        real *to = d_taps + (before - lag) * D + at;
                        store(to, load(to, count) + d_c * load(input(call, in, b, t, lag, at), count), count);
                    }
                    if (d_bias) store(d_bias + at, load(d_bias + at, count) + d_c, count);
                    store(d + at, d_c, count);
                }
            }
            /* In order of time: input t reads gradients from t on and overwrites its own, which no later one needs. */
            for (int64_t t = -before; t < T; t++)
                for (int64_t at = begin; at < end; at += LANES) {
                    int count = width_at(at, end);
                    vec d = {0};
                    for (int64_t lag = t < 0 ? -t : 0; lag <= before && t + lag < T; lag++) {
                        if (lags(call, in, b, t + lag) < lag) continue;
                        d += load(in->taps + (before - lag) * D + at, count) *
                             load(d_x + (b * T + t + lag) * D + at, count);
                    }
                    store((t < 0 ? d_past + (b * before + before + t) * D : d_x + (b * T + t) * D) + at, d, count);
                }
        }
    }
    return 0;
}
