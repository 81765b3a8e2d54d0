/* Operations on one token per row of a stream: linear maps with the steps that follow them, and the steps between maps.
For a vector of a few hundred numbers, a PyTorch operator takes longer than the arithmetic. Called through ctypes
(steps.py). */

#include "../vector.h"

enum { IDENTITY, SILU, SIGMOID };

/* y = weight x + bias, then in this order, each if given: a causal convolution, an activation, heads normalised to unit
length, an RMSNorm of every head, a rotation by the token's position, a factor, a term. All but x, weight and out may be
NULL.

x (batch, inputs); weight (outputs, inputs); bias (outputs); taps (outputs, width), the token's own last; past and newest
(batch, width - 1, outputs), the convolution's inputs before this token and before the next; norm (normal); cosine, sine
(half a head); factor, term, out, unturned (batch, outputs): unturned is y before the rotation. */
typedef struct {
    const real *x, *weight, *bias, *taps, *past, *norm, *cosine, *sine, *factor, *term;
    real *out, *newest, *unturned;
    int64_t inputs, outputs, width, activation;
    int64_t unit;   /* outputs per head that is normalised to unit length; 0: no heads */
    int64_t normal; /* outputs per head that passes the RMSNorm */
    int64_t head;   /* outputs per head that is rotated */
    double eps;     /* of the RMSNorm */
} Map;

/* Sum LANES vectors: lane i of the result is the sum of vector i. All vectors are halved together, since sums lane by
lane take longer than the products before them. While n vectors remain, each sum has n neighbouring lanes. */
INLINE vec sums(vec *x) {
#pragma GCC unroll 4
    for (int n = LANES; n > 1; n /= 2) {
        ints low, high;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            int part = i / (n / 2), parts = LANES / n;
            low[i] = part / parts * LANES + part % parts * n + i % (n / 2);
            high[i] = low[i] + n / 2;
        }
#pragma GCC unroll 8
        for (int i = 0; i < n / 2; i++)
            x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high);
    }
    return x[0];
}

/* Products of LANES rows of weight with x, which is read once for all of them. */
INLINE vec products(const real *weight, const real *x, int64_t inputs) {
    vec each[LANES];
#pragma GCC unroll 16
    for (int row = 0; row < LANES; row++) each[row] = (vec){0};
    int64_t i = 0;
    for (; i + LANES <= inputs; i += LANES) {
        vec from = CONST_AT(x, i);
#pragma GCC unroll 16
        for (int row = 0; row < LANES; row++) each[row] += CONST_AT(weight, row * inputs + i) * from;
    }
    vec out = sums(each);
    for (; i < inputs; i++)
        for (int row = 0; row < LANES; row++) out[row] += weight[row * inputs + i] * x[i];
    return out;
}

/* out = weight x. Rows of weight are applied to all rows of x while they are in the cache. */
static void linear(const Map *map, int64_t batch) {
    int64_t i = 0, N = map->outputs, D = map->inputs;
    for (; i + LANES <= N; i += LANES)
        for (int64_t b = 0; b < batch; b++) AT(map->out, b * N + i) = products(map->weight + i * D, map->x + b * D, D);
    for (; i < N; i++)
        for (int64_t b = 0; b < batch; b++) map->out[b * N + i] = dot(map->weight + i * D, map->x + b * D, D);
}

static void convolve(const Map *map, const real *past, real *newest, real *y) {
    int64_t N = map->outputs, before = map->width - 1;
    memcpy(newest, past + N, (before - 1) * N * sizeof(real));
    memcpy(newest + (before - 1) * N, y, N * sizeof(real));
    for (int64_t i = 0; i < N; i++) {
        const real *taps = map->taps + i * map->width;
        real total = y[i] * taps[before];
        for (int64_t lag = 0; lag < before; lag++) total += past[lag * N + i] * taps[lag];
        y[i] = total;
    }
}

static void activate(int64_t kind, int64_t count, real *y) {
    for (int64_t i = 0; i < count; i += LANES) {
        vec z = {0};
        size_t size = (count - i < LANES ? count - i : LANES) * sizeof(real);
        memcpy(&z, y + i, size);
        vec gate = share(z);
        if (kind == SILU) gate *= z;
        memcpy(y + i, &gate, size);
    }
}

static void make_unit(int64_t unit, real *y) {
    real length = sqrt(dot(y, y, unit)), scale = 1 / (length > SMALLEST ? length : SMALLEST);
    for (int64_t i = 0; i < unit; i++) y[i] *= scale;
}

static void normalise(const Map *map, real *y) {
    int64_t D = map->normal;
    real scale = 1 / sqrt(dot(y, y, D) / D + (real)map->eps);
    for (int64_t i = 0; i < D; i++) y[i] *= scale * map->norm[i];
}

static void turn(const Map *map, real *y) {
    int64_t half = map->head / 2;
    for (int64_t i = 0; i < half; i++) {
        real a = y[i], b = y[half + i], c = map->cosine[i], s = map->sine[i];
        y[i] = a * c - b * s, y[half + i] = b * c + a * s;
    }
}

/* Run the maps in order: x, factor or term of a map may be the output of an earlier one. */
void project(int64_t batch, const Map *maps, int64_t count) {
    for (const Map *map = maps; map < maps + count; map++) {
        int64_t N = map->outputs, held = (map->width - 1) * N;
        linear(map, batch);
        for (int64_t b = 0; b < batch; b++) {
            real *y = map->out + b * N;
            for (int64_t i = 0; map->bias && i < N; i++) y[i] += map->bias[i];
            if (held) convolve(map, map->past + b * held, map->newest + b * held, y);
            if (map->activation != IDENTITY) activate(map->activation, N, y);
            for (int64_t at = 0; map->unit && at < N; at += map->unit) make_unit(map->unit, y + at);
            for (int64_t at = 0; map->norm && at < N; at += map->normal) normalise(map, y + at);
            if (map->unturned) memcpy(map->unturned + b * N, y, N * sizeof(real));
            for (int64_t at = 0; map->cosine && at < N; at += map->head) turn(map, y + at);
            for (int64_t i = 0; map->factor && i < N; i++) y[i] *= map->factor[b * N + i];
            for (int64_t i = 0; map->term && i < N; i++) y[i] += map->term[b * N + i];
        }
    }
}

/* Rotation at a position: turns (half), turns per token of each pair of a head. Counted in double; see rotary.py. */
void rotation(int64_t place, int64_t half, const double *turns, real *cosine, real *sine) {
    for (int64_t i = 0; i < half; i++) {
        double all = place * turns[i], angle = 6.283185307179586 * (all - nearbyint(all));
        cosine[i] = cos(angle), sine[i] = sin(angle);
    }
}

/* out = a + w b; a, b, out (batch, width), w (width) or NULL for 1. */
void add(int64_t batch, int64_t width, const real *a, const real *w, const real *b, real *out) {
    for (int64_t row = 0; row < batch; row++)
        for (int64_t i = row * width; i < (row + 1) * width; i++) out[i] = a[i] + (w ? w[i - row * width] : 1) * b[i];
}

/* out = a + part (b - a); a, b, out (heads, width), part (heads). */
void blend(int64_t heads, int64_t width, const real *a, const real *b, const real *part, real *out) {
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = head * width; i < (head + 1) * width; i++) out[i] = a[i] + part[head] * (b[i] - a[i]);
}

/* titans_pt/layers/memory.py's MemoryGates: raw (count, 3) -> theta, eta, alpha (count). */
typedef struct {
    int64_t count, hard, free, momentum, forgetting;
    double bound, stretch;
} Gates;

INLINE real sigmoid(real z) { return 1 / (1 + exp(-z)); }

INLINE real cut(const Gates *gates, real share) {
    real wide = (1 + 2 * gates->stretch) * share - gates->stretch;
    return !gates->hard ? share : wide < 0 ? 0 : wide > 1 ? 1 : wide;
}

void memory_gates(const Gates *gates, const real *raw, int64_t writes, real *theta, real *eta, real *alpha) {
    for (int64_t i = 0; i < gates->count; i++, raw += 3) {
        real step = raw[0];
        eta[i] = gates->momentum ? sigmoid(raw[1]) : 0;
        alpha[i] = gates->forgetting ? cut(gates, sigmoid(raw[2])) : 0;
        if (gates->free)
            theta[i] = step > 20 ? step : log1p(exp(step));
        else
            theta[i] = gates->bound * (1 - eta[i]) * cut(gates, sigmoid(step));
        if (!writes) theta[i] = eta[i] = alpha[i] = 0;
    }
}
