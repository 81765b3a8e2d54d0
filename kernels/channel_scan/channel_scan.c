/* The selective scan, forward and backward. A vector holds neighbouring channels; their states stay in a core's cache for
the whole sequence. Decays are computed where they are used; only those of one tile of tokens are stored. The forward pass
saves the state before each tile, and the backward pass recomputes the tiles, last one first. Called through ctypes
(native.py). */

#include "../vector.h"

/* tile: tokens per tile. block: channels of one row that one thread computes together. */
typedef struct {
    int64_t batch, tokens, channels, states, tile, block;
} Call;

/* x, step (batch, tokens, channels), k, q (batch, tokens, states), rate (states, channels) or NULL: Longhorn's decay,
reset (batch, tokens) or NULL. */
typedef struct {
    const real *x, *step, *k, *q, *rate;
    const uint8_t *reset;
} Inputs;

INLINE int64_t blocks(const Call *call) { return (call->channels + call->block - 1) / call->block; }
INLINE int64_t tiles(const Call *call) { return (call->tokens + call->tile - 1) / call->tile; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Load ``count`` channels of a state (states, channels) into vectors; scatter stores them back. */
INLINE void gather(const Call *call, const real *from, int count, vec *to) {
    for (int64_t n = 0; n < call->states; n++) to[n] = load(from + n * call->channels, count);
}

INLINE void scatter(const Call *call, real *to, int count, const vec *from) {
    for (int64_t n = 0; n < call->states; n++) store(to + n * call->channels, from[n], count);
}

INLINE vec decay(int mamba, vec rate, vec step, real k) {
    if (mamba) return exponential(-(rate * step));
    return 1 - step * (k * k);
}

INLINE void scan(const Call *call, const Inputs *in, int mamba, int64_t b, int64_t at, int count, const vec *rate, vec *h,
                 real *out, real *starts) {
    int64_t T = call->tokens, D = call->channels, N = call->states;
    for (int64_t t = 0; t < T; t++) {
        int64_t row = b * T + t;
        const real *k = in->k + row * N, *q = in->q + row * N;
        vec s = load(in->step + row * D + at, count), u = s * load(in->x + row * D + at, count), y = {0};
        if (starts && t % call->tile == 0)
            scatter(call, starts + (b * tiles(call) + t / call->tile) * N * D + at, count, h);
        if (in->reset && in->reset[row]) memset(h, 0, N * sizeof(vec));
        for (int64_t n = 0; n < N; n++) {
            h[n] = decay(mamba, rate[n], s, k[n]) * h[n] + u * k[n];
            y += q[n] * h[n];
        }
        store(out + row * D + at, y, count);
    }
}

/* state (batch, states, channels) -> out (batch, tokens, channels), after (as state) and, unless NULL, starts (batch,
tiles, states, channels), the states before each tile. Items first .. last - 1 of batch * blocks. */
int forward(const Call *call, const Inputs *in, const real *state, real *out, real *after, real *starts, int64_t first,
            int64_t last) {
    int64_t D = call->channels, N = call->states;
    vec *rate = aligned_alloc(BYTES, 2 * N * sizeof(vec)), *h = rate + N;
    if (!rate) return 1;
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / blocks(call), begin = item % blocks(call) * call->block;
        for (int64_t at = begin, end = smaller(begin + call->block, D); at < end; at += LANES) {
            int count = width_at(at, end);
            gather(call, state + b * N * D + at, count, h);
            if (in->rate) {
                gather(call, in->rate + at, count, rate);
                scan(call, in, 1, b, at, count, rate, h, out, starts);
            } else
                scan(call, in, 0, b, at, count, rate, h, out, starts);
            scatter(call, after + b * N * D + at, count, h);
        }
    }
    free(rate);
    return 0;
}

/* Work space for one vector of channels in one tile: h (tile + 1, states), the states before its tokens and after the
last; a, to_k, to_q (tile, states); rate, d_rate (states); later (states), the gradient of the state after a token. */
typedef struct {
    vec *h, *a, *to_k, *to_q, *rate, *d_rate, *later;
} Work;

INLINE void reverse_tile(const Call *call, const Inputs *in, int mamba, int64_t row, int64_t length, int64_t at, int count,
                         const Work *w, const real *d_out, real *d_x, real *d_step) {
    int64_t D = call->channels, N = call->states;
    for (int64_t t = 0; t < length; t++) {
        const real *k = in->k + (row + t) * N;
        vec s = load(in->step + (row + t) * D + at, count), u = s * load(in->x + (row + t) * D + at, count);
        real kept = !(in->reset && in->reset[row + t]);
        for (int64_t n = 0; n < N; n++) {
            vec a = decay(mamba, w->rate[n], s, k[n]) * kept;
            w->a[t * N + n] = a;
            w->h[(t + 1) * N + n] = a * w->h[t * N + n] + u * k[n];
        }
    }
    for (int64_t t = length - 1; t >= 0; t--) {
        const real *k = in->k + (row + t) * N, *q = in->q + (row + t) * N;
        int64_t place = (row + t) * D + at;
        vec s = load(in->step + place, count), x = load(in->x + place, count), d_y = load(d_out + place, count);
        vec u = s * x, to_u = {0}, to_s = {0};
        real kept = !(in->reset && in->reset[row + t]);
        for (int64_t n = 0; n < N; n++) {
            int64_t i = t * N + n;
            /* A decay that a reset replaces has no gradient. */
            vec d_h = w->later[n] + d_y * q[n], to_a = d_h * w->h[i] * kept;
            w->to_q[i] += d_y * w->h[i + N];
            w->later[n] = w->a[i] * d_h;
            to_u += d_h * k[n];
            if (mamba) {
                vec to_log = to_a * w->a[i];
                to_s -= to_log * w->rate[n];
                w->d_rate[n] -= to_log * s;
                w->to_k[i] += d_h * u;
            } else {
                to_s -= to_a * (k[n] * k[n]);
                w->to_k[i] += d_h * u - to_a * s * (2 * k[n]);
            }
        }
        store(d_x + place, s * to_u, count);
        store(d_step + place, to_s + x * to_u, count);
    }
}

/* d_out -> d_x, d_step as x; d_k, d_q (blocks, batch, tokens, states) and d_rate (batch, states, channels), partial
sums. d_state: the gradient of ``after`` on entry, of ``state`` on return. Items as above. */
int backward(const Call *call, const Inputs *in, const real *starts, const real *d_out, real *d_state, real *d_x,
             real *d_step, real *d_k, real *d_q, real *d_rate, int64_t first, int64_t last) {
    int64_t B = call->batch, T = call->tokens, D = call->channels, N = call->states, cells = call->tile * N;
    /* later and d_rate are kept for each vector of a block. */
    int64_t vectors = (call->block + LANES - 1) / LANES;
    vec *memory = aligned_alloc(BYTES, (4 * cells + 2 * N + 2 * vectors * N) * sizeof(vec));
    if (!memory) return 1;
    Work w = {.h = memory, .a = memory + cells + N};
    w.to_k = w.a + cells, w.to_q = w.to_k + cells, w.rate = w.to_q + cells;
    vec *later = w.rate + N, *of_rate = later + vectors * N;
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / blocks(call), block = item % blocks(call), begin = block * call->block;
        int64_t end = smaller(begin + call->block, D), v = 0;
        memset(of_rate, 0, vectors * N * sizeof(vec));
        for (int64_t at = begin; at < end; at += LANES, v++)
            gather(call, d_state + b * N * D + at, width_at(at, end), later + v * N);
        for (int64_t tile = tiles(call) - 1; tile >= 0; tile--) {
            int64_t row = b * T + tile * call->tile, length = smaller(call->tile, T - tile * call->tile);
            memset(w.to_k, 0, 2 * cells * sizeof(vec));
            v = 0;
            for (int64_t at = begin; at < end; at += LANES, v++) {
                int count = width_at(at, end);
                w.later = later + v * N, w.d_rate = of_rate + v * N;
                gather(call, starts + (b * tiles(call) + tile) * N * D + at, count, w.h);
                if (in->rate) {
                    gather(call, in->rate + at, count, w.rate);
                    reverse_tile(call, in, 1, row, length, at, count, &w, d_out, d_x, d_step);
                } else
                    reverse_tile(call, in, 0, row, length, at, count, &w, d_out, d_x, d_step);
            }
            for (int64_t i = 0, to = (block * B * T + row) * N; i < length * N; i++) {
                d_k[to + i] = sum(w.to_k[i]);
                d_q[to + i] = sum(w.to_q[i]);
            }
        }
        v = 0;
        for (int64_t at = begin; at < end; at += LANES, v++) {
            scatter(call, d_state + b * N * D + at, width_at(at, end), later + v * N);
            if (in->rate) scatter(call, d_rate + b * N * D + at, width_at(at, end), of_rate + v * N);
        }
    }
    free(memory);
    return 0;
}
