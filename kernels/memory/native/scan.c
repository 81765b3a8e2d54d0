/* The memory's recurrence over blocks on a CPU: the dual form of dual.py, forward and backward, one row at a time.

A row is one head of one batch row; its weights stay in the core's cache while its blocks pass. Names are those of
dual.py. Activations are stored feature by feature, "T": (features x tokens), tokens padded to whole vectors, so that
what belongs to one token (gates, LayerNorm statistics) is one lane of a vector. Where tokens are summed over, a matrix
is needed token by token, "R": (tokens x features).

Compiled once per machine for REAL = float or double (native.py), called through ctypes. */

#include "network.h"

#if BYTES == 64
#define REGISTERS 24
#else
#define REGISTERS 12
#endif
#define STEP (LANES < 4 ? 4 : LANES)
#define PAD(n) (((n) + STEP - 1) / STEP * STEP)

/* What every call is told; native.py has the same fields. */
typedef struct {
    int64_t blocks, rows, tokens, layers, width, hidden, gate_layers;
    int64_t activation, norm, residual, to_start;
    int64_t every; /* blocks between two states that are kept for the backward pass; 0: none is */
    /* Where row r's token t of block n is, in numbers: r / heads * batch + r % heads * head + n * block + t * token, and
    the same with gate_* for gates, plus layer * gate_layer. */
    int64_t heads, batch, head, block, token, gate_batch, gate_head, gate_block, gate_token, gate_layer;
} Call;

/* ---- products of matrices */

INLINE void tile(int rows, int vectors, int K, const real *A, long am, long ak, const real *B, long ldb, real *C,
                 long ldc, int sign) {
    vec sum[REGISTERS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * vectors; i++) sum[i] = (vec){0};
    for (int k = 0; k < K; k++) {
#pragma GCC unroll 32
        for (int i = 0; i < rows; i++) {
            real a = A[i * am + k * ak];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i * vectors + j] += a * CONST_AT(B, k * ldb + j * LANES);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            vec *c = &AT(C, i * ldc + j * LANES);
            vec s = sum[i * vectors + j];
            if (sign > 0)
                s = *c + s;
            else if (sign < 0)
                s = *c - s;
            *c = s;
        }
    }
}

#define TILE(rows, vectors)                                                                                           \
    static __attribute__((noinline)) void tile_##rows##_##vectors(int K, const real *A, long am, long ak,             \
                                                                  const real *B, long ldb, real *C, long ldc,         \
                                                                  int sign) {                                         \
        tile(rows, vectors, K, A, am, ak, B, ldb, C, ldc, sign);                                                      \
    }
#if REGISTERS == 24
#define ROWS_1 16
#define ROWS_2 12
#define ROWS_3 8
TILE(16, 1) TILE(12, 2) TILE(8, 3)
#define BIG(v) (v == 1 ? tile_16_1 : v == 2 ? tile_12_2 : tile_8_3)
#else
#define ROWS_1 8
#define ROWS_2 6
#define ROWS_3 4
TILE(8, 1) TILE(6, 2)
#define BIG(v) (v == 1 ? tile_8_1 : v == 2 ? tile_6_2 : tile_4_3)
#endif
TILE(4, 1) TILE(4, 2) TILE(4, 3) TILE(1, 1) TILE(1, 2) TILE(1, 3)

/* C (M x N) = or += or -= A B; A[m, k] = A[m am + k ak]; B (K x N) and C in rows of whole vectors. */
static void product(int M, int N, int K, const real *A, long am, long ak, const real *B, long ldb, real *C, long ldc,
                    int sign) {
    int left = N / LANES;
    for (int j = 0; left > 0;) {
        int v = left % 3 == 0 ? 3 : left >= 2 ? 2 : 1, i = 0;
        int rows = v == 1 ? ROWS_1 : v == 2 ? ROWS_2 : ROWS_3;
        for (; i + rows <= M; i += rows) BIG(v)(K, A + i * am, am, ak, B + j, ldb, C + i * ldc + j, ldc, sign);
        for (; i + 4 <= M; i += 4)
            (v == 1 ? tile_4_1 : v == 2 ? tile_4_2 : tile_4_3)(K, A + i * am, am, ak, B + j, ldb, C + i * ldc + j, ldc,
                                                               sign);
        for (; i < M; i++)
            (v == 1 ? tile_1_1 : v == 2 ? tile_1_2 : tile_1_3)(K, A + i * am, am, ak, B + j, ldb, C + i * ldc + j, ldc,
                                                               sign);
        left -= v;
        j += v * LANES;
    }
}

typedef real four __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));
#ifdef REAL_IS_DOUBLE
typedef int64_t pick __attribute__((vector_size(32)));
#else
typedef int32_t pick __attribute__((vector_size(16)));
#endif

/* from (rows x columns) -> to (columns x rows), both padded to multiples of four. */
static void transpose(const real *from, long ldf, int rows, int columns, real *to, long ldt) {
    const pick low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    for (int i = 0; i < rows; i += 4)
        for (int j = 0; j < columns; j += 4) {
            const real *f = from + i * ldf + j;
            real *t = to + j * ldt + i;
            four a = *(const four *)f, b = *(const four *)(f + ldf);
            four c = *(const four *)(f + 2 * ldf), d = *(const four *)(f + 3 * ldf);
            four ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
            *(four *)t = __builtin_shuffle(ab, cd, first);
            *(four *)(t + ldt) = __builtin_shuffle(ab, cd, second);
            ab = __builtin_shuffle(a, b, high), cd = __builtin_shuffle(c, d, high);
            *(four *)(t + 2 * ldt) = __builtin_shuffle(ab, cd, first);
            *(four *)(t + 3 * ldt) = __builtin_shuffle(ab, cd, second);
        }
}

/* ---- the activation's second derivative */

/* out = a * b * act''(z) */
static void curve(int kind, int count, const real *z, const real *a, const real *b, real *out) {
    for (int i = 0; i < count; i += LANES) {
        vec x = CONST_AT(z, i), second;
        if (kind == GELU) {
            second = (2 - x * x) * exponential(x * x * (real)-0.5) * (real)0.39894228040143268;
        } else if (kind == SILU) {
            vec y = share(x);
            second = y * (1 - y) * (2 + x * (1 - 2 * y));
        } else {
            second = x * 0;
        }
        AT(out, i) = CONST_AT(a, i) * CONST_AT(b, i) * second;
    }
}

/* ---- LayerNorm of every token, over the rows of a T matrix */

typedef struct {
    real *unit, *scale; /* (D x tokens), (tokens): what comes out before the affine part; 1 / standard deviation */
} Unit;

INLINE vec root(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = 1 / sqrt(x[i]);
    return x;
}

static void normalise(int D, int lanes, const real *f, Unit u) {
    for (int t = 0; t < lanes; t += LANES) {
        vec mean = {0}, square = {0};
        for (int i = 0; i < D; i++) mean += CONST_AT(f, i * lanes + t);
        mean /= (real)D;
        for (int i = 0; i < D; i++) {
            vec x = CONST_AT(f, i * lanes + t) - mean;
            AT(u.unit, i * lanes + t) = x;
            square += x * x;
        }
        vec scale = root(square / (real)D + EPSILON);
        AT(u.scale, t) = scale;
        for (int i = 0; i < D; i++) AT(u.unit, i * lanes + t) *= scale;
    }
}

/* Vector-Jacobian product; the Jacobian is symmetric. out may be upstream. */
static void normalise_back(int D, int lanes, const real *upstream, Unit u, real *out) {
    for (int t = 0; t < lanes; t += LANES) {
        vec mean = {0}, along = {0}, scale = CONST_AT(u.scale, t);
        for (int i = 0; i < D; i++) {
            vec x = CONST_AT(upstream, i * lanes + t);
            mean += x;
            along += x * CONST_AT(u.unit, i * lanes + t);
        }
        mean /= (real)D;
        along /= (real)D;
        for (int i = 0; i < D; i++)
            AT(out, i * lanes + t) =
                (CONST_AT(upstream, i * lanes + t) - mean - CONST_AT(u.unit, i * lanes + t) * along) * scale;
    }
}

/* ---- what the gates say: coefficients.py, as recurrences over the tokens */

typedef struct {
    real *E, *P;          /* (tokens x tokens), [t, i] */
    real *A, *B, *m;      /* (tokens), of the block's first M and S in M_t and S_t */
    real *mix, *mix_T;    /* P[t, i] theta_i, and [i, t] */
    real *p, *e;          /* (tokens), what of a token's gradient is in the last M and S */
} Gates;

typedef struct {
    const real *theta, *eta, *alpha, *valid; /* of each token; valid NULL where all are */
    int64_t step;                            /* between two tokens, but for valid */
} Given;

static void gates(int c, int lanes, Given g, Gates *o) {
    real A = 1, B = 0, m = 1;
    for (int t = 0; t < c; t++) {
        real keep = 1, eta = 1, counts = g.valid ? g.valid[t] : 1;
        if (counts) keep = 1 - g.alpha[t * g.step], eta = g.eta[t * g.step];
        real *E = o->E + t * lanes, *P = o->P + t * lanes;
        if (t) {
            for (int i = 0; i < lanes; i++) E[i] = eta * E[i - lanes];
            for (int i = 0; i < lanes; i++) P[i] = keep * P[i - lanes];
        } else {
            memset(E, 0, lanes * sizeof(real));
            memset(P, 0, lanes * sizeof(real));
        }
        E[t] = 1;
        for (int i = 0; i <= t; i++) P[i] += counts * E[i];
        m *= eta, A *= keep, B = keep * B + counts * m;
        o->A[t] = A, o->B[t] = B, o->m[t] = m;
    }
    for (int t = c; t < lanes; t++) o->A[t] = o->B[t] = o->m[t] = 0;
    const real *last_E = o->E + (c - 1) * lanes, *last_P = o->P + (c - 1) * lanes;
    real theta[lanes];
    for (int i = 0; i < lanes; i++) theta[i] = i < c && (!g.valid || g.valid[i]) ? g.theta[i * g.step] : 0;
    for (int i = 0; i < lanes; i++) o->e[i] = last_E[i] * theta[i], o->p[i] = last_P[i] * theta[i];
    for (int t = 0; t < lanes; t++)
        for (int i = 0; i < lanes; i++) o->mix[t * lanes + i] = t < c ? o->P[t * lanes + i] * theta[i] : 0;
    transpose(o->mix, lanes, lanes, lanes, o->mix_T, lanes);
}

INLINE real total(vec x) {
    real sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

/* From the gradients of mix (overwritten), A, B, the last m and e to those of theta, eta and alpha (tokens, padded),
which are added to. */
static void gates_back(int c, int lanes, Given g, const Gates *o, real *d_mix, const real *d_A, const real *d_B,
                       real d_m, const real *d_e, real *d_theta, real *d_eta, real *d_alpha) {
    real d_E[lanes], d_P[lanes], theta[lanes];
    const real *last_E = o->E + (c - 1) * lanes;
    for (int i = 0; i < lanes; i++) {
        theta[i] = i < c && (!g.valid || g.valid[i]) ? g.theta[i * g.step] : 0;
        d_E[i] = d_e[i] * theta[i];
        d_P[i] = 0;
        d_theta[i] += d_e[i] * last_E[i];
    }
    real dA = 0, dB = 0, dm = d_m;
    for (int t = c - 1; t >= 0; t--) {
        real keep = 1, eta = 1, counts = g.valid ? g.valid[t] : 1;
        if (counts) keep = 1 - g.alpha[t * g.step], eta = g.eta[t * g.step];
        const real *E = o->E + t * lanes, *P = o->P + t * lanes;
        real *own = d_mix + t * lanes;
        memset(own + t + 1, 0, (lanes - t - 1) * sizeof(real)); /* what no token sees of later ones */
        dA += d_A[t];
        dB += d_B[t];
        dm += counts * dB;
        vec of_keep = {0}, of_eta = {0};
        for (int i = 0; i <= t; i += LANES) {
            vec dP = CONST_AT(d_P, i) + CONST_AT(own, i) * CONST_AT(theta, i);
            vec dE = CONST_AT(d_E, i) + counts * dP;
            AT(d_theta, i) += CONST_AT(own, i) * CONST_AT(P, i);
            if (t) of_keep += dP * CONST_AT(P, i - lanes), of_eta += dE * CONST_AT(E, i - lanes);
            AT(d_P, i) = dP * keep;
            AT(d_E, i) = dE * eta;
        }
        if (counts) {
            d_alpha[t] -= total(of_keep) + dA * (t ? o->A[t - 1] : 1) + dB * (t ? o->B[t - 1] : 0);
            d_eta[t] += total(of_eta) + dm * (t ? o->m[t - 1] : 1);
        }
        dA *= keep, dB *= keep, dm *= eta;
    }
    for (int i = 0; g.valid && i < c; i++) d_theta[i] *= g.valid[i];
}

/* ---- one block */

/* A layer's intermediates; see dual.py. GR is G token by token. */
typedef struct {
    int in, out, ld; /* features in and out; row length of the weights */
    real *X, *G, *hidden, *slope, *pulled, *Z, *query_hidden, *scores, *ZW, *ZS, *GR;
    real *dX, *dG, *d_hidden; /* of the backward pass */
} Layer;

typedef struct {
    int c, lanes, layers, D, activation, norm, residual, gate_layers, to_start;
    int64_t state; /* numbers of one weight set, padded */
    Layer layer[MAX_LAYERS];
    Unit key, query;
    Gates gate[MAX_LAYERS];
    real *q, *k, *v, *error, *f, *z, *out, *t1, *t2, *t3, *r;        /* temporary T and R matrices of any size in use */
    real *mixed, *mixed_T, *d_scores, *d_scores_T, *square;    /* (tokens x tokens) */
    real *d_out, *d_q, *d_k, *d_v;
    real *d_mix[MAX_LAYERS], *d_A[MAX_LAYERS], *d_B[MAX_LAYERS], *d_e[MAX_LAYERS], d_m[MAX_LAYERS];
    const real *gamma, *beta; /* (D) */
    real *d_gamma, *d_beta;   /* (D) */
} Block;

static int64_t set_layer(const Call *call, Block *b) {
    int64_t at = 0;
    b->c = call->tokens, b->lanes = PAD(call->tokens), b->layers = call->layers, b->D = call->width;
    b->activation = call->activation, b->norm = call->norm, b->residual = call->residual;
    b->gate_layers = call->gate_layers, b->to_start = call->to_start;
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        l->in = n ? call->hidden : call->width;
        l->out = n + 1 < b->layers ? call->hidden : call->width;
        l->ld = PAD(l->out);
        at += (int64_t)l->in * l->ld;
    }
    b->state = at;
    return at;
}

typedef struct {
    real *begin, *next;
} Arena;

static real *take(Arena *a, int64_t count) {
    real *p = a->next;
    a->next += (count + 15) / 16 * 16;
    return a->begin ? p : NULL;
}

#define UP4(n) (((n) + 3) / 4 * 4)

/* Lays out a block's matrices; with an arena that begins nowhere it only counts. */
static void lay_out(Block *b, Arena *a) {
    int lanes = b->lanes, widest = b->D;
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        widest = l->in > widest ? l->in : widest, widest = l->out > widest ? l->out : widest;
    }
    int64_t t = (int64_t)UP4(widest) * lanes, r = (int64_t)lanes * PAD(widest), square = lanes * lanes;
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        real **in[] = {&l->X, &l->Z, &l->dX}, **out[] = {&l->G, &l->ZW, &l->ZS, &l->dG};
        real **inner[] = {&l->hidden, &l->slope, &l->pulled, &l->query_hidden, &l->d_hidden};
        for (int i = 0; i < 3; i++) *in[i] = take(a, (int64_t)UP4(l->in) * lanes);
        for (int i = 0; i < 4; i++) *out[i] = take(a, (int64_t)UP4(l->out) * lanes);
        for (int i = 0; i < 5; i++) *inner[i] = n + 1 < b->layers ? take(a, (int64_t)UP4(l->out) * lanes) : NULL;
        l->scores = take(a, square);
        l->GR = take(a, (int64_t)lanes * PAD(l->out));
    }
    Unit *units[] = {&b->key, &b->query};
    for (int i = 0; i < 2; i++) units[i]->unit = take(a, (int64_t)UP4(b->D) * lanes), units[i]->scale = take(a, lanes);
    for (int n = 0; n < b->gate_layers; n++) {
        Gates *g = &b->gate[n];
        real **squares[] = {&g->E, &g->P, &g->mix, &g->mix_T, &b->d_mix[n]};
        real **vectors[] = {&g->A, &g->B, &g->m, &g->p, &g->e, &b->d_A[n], &b->d_B[n], &b->d_e[n]};
        for (int i = 0; i < 5; i++) *squares[i] = take(a, square);
        for (int i = 0; i < 8; i++) *vectors[i] = take(a, lanes);
    }
    real **narrow[] = {&b->q, &b->k, &b->v, &b->error, &b->f, &b->out, &b->d_out, &b->d_q, &b->d_k, &b->d_v};
    for (int i = 0; i < 10; i++) *narrow[i] = take(a, (int64_t)UP4(b->D) * lanes);
    real **wide[] = {&b->z, &b->t1, &b->t2, &b->t3};
    for (int i = 0; i < 4; i++) *wide[i] = take(a, t > square ? t : square);
    b->r = take(a, r);
    real **squares[] = {&b->mixed, &b->mixed_T, &b->d_scores, &b->d_scores_T, &b->square};
    for (int i = 0; i < 5; i++) *squares[i] = take(a, square);
}

/* Tokens as the caller has them <-> (D x lanes). */
static void load_tokens(const Block *b, const real *from, int64_t step, real *to) {
    for (int i = 0; i < b->D; i++) {
        for (int t = 0; t < b->c; t++) to[i * b->lanes + t] = from[t * step + i];
        for (int t = b->c; t < b->lanes; t++) to[i * b->lanes + t] = 0;
    }
}

static void store_tokens(const Block *b, const real *from, int64_t step, real *to) {
    for (int t = 0; t < b->c; t++)
        for (int i = 0; i < b->D; i++) to[t * step + i] = from[i * b->lanes + t];
}

/* to = from scaled token by token, transposed to (tokens x features). */
static void by_token(const Block *b, int features, const real *from, const real *scale, real *to) {
    int ld = PAD(features);
    transpose(from, b->lanes, UP4(features), b->lanes, to, ld);
    for (int t = 0; t < b->c; t++) {
        for (int i = features; i < ld; i++) to[t * ld + i] = 0;
        for (int i = 0; scale && i < ld; i += LANES) AT(to, t * ld + i) *= scale[t];
    }
}

/* out = from scaled token by token. */
static void scaled(const Block *b, int features, const real *from, const real *scale, real *out) {
    for (int i = 0; i < features; i++)
        for (int t = 0; t < b->lanes; t += LANES)
            AT(out, i * b->lanes + t) = CONST_AT(from, i * b->lanes + t) * CONST_AT(scale, t);
}

static const Gates *gate(const Block *b, int n) { return &b->gate[b->gate_layers > 1 ? n : 0]; }

/* Rank-one factors of the inner gradient at F: fills X, hidden, slope, error, pulled, G, GR. */
static void key_side(Block *b, const real *F) {
    int lanes = b->lanes, last = b->layers - 1;
    const real *weights[MAX_LAYERS];
    const real *f = F;
    for (int n = 0; n <= last; n++) weights[n] = f, f += (int64_t)b->layer[n].in * b->layer[n].ld;
    memcpy(b->layer[0].X, b->k, (size_t)b->D * lanes * sizeof(real));
    for (int n = 0; n <= last; n++) {
        Layer *l = &b->layer[n];
        real *out = n < last ? l->hidden : b->f;
        product(l->out, lanes, l->in, weights[n], 1, l->ld, l->X, lanes, out, lanes, 0);
        if (n < last) activate(b->activation, l->out * lanes, out, b->layer[n + 1].X, l->slope);
    }
    if (b->norm) normalise(b->D, lanes, b->f, b->key);
    real *g = b->layer[last].G;
    for (int i = 0; i < b->D; i++) {
        real gamma = b->norm ? b->gamma[i] : 1, beta = b->norm ? b->beta[i] : 0;
        for (int t = i * lanes; t < (i + 1) * lanes; t += LANES) {
            vec y = CONST_AT(b->norm ? b->key.unit : b->f, t);
            if (b->norm) y = y * gamma + beta;
            if (b->residual) y += CONST_AT(b->k, t);
            vec error = 2 * (y - CONST_AT(b->v, t));
            AT(b->error, t) = error;
            AT(g, t) = error * gamma;
        }
    }
    if (b->norm) normalise_back(b->D, lanes, g, b->key, g);
    for (int n = last; n >= 0; n--) {
        Layer *l = &b->layer[n];
        by_token(b, l->out, l->G, NULL, l->GR);
        if (!n) break;
        Layer *below = &b->layer[n - 1];
        product(l->in, lanes, l->out, weights[n], l->ld, 1, l->G, lanes, below->pulled, lanes, 0);
        for (int i = 0; i < below->out * lanes; i += LANES)
            AT(below->G, i) = CONST_AT(below->pulled, i) * CONST_AT(below->slope, i);
    }
}

/* W and S (one weight set each, layer after layer) after the block. */
static void write(Block *b, real *W, real *S) {
    int c = b->c;
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        const Gates *g = gate(b, n);
        real a = g->A[c - 1], from_s = g->B[c - 1], m = g->m[c - 1];
        int64_t size = (int64_t)l->in * l->ld;
        for (int64_t i = 0; i < size; i += LANES) {
            vec w = CONST_AT(W, i), s = CONST_AT(S, i);
            AT(W, i) = a * w + from_s * s;
            AT(S, i) = m * s;
        }
        scaled(b, l->in, l->X, g->p, b->t1);
        product(l->in, l->ld, c, b->t1, b->lanes, 1, l->GR, l->ld, W, l->ld, -1);
        scaled(b, l->in, l->X, g->e, b->t1);
        product(l->in, l->ld, c, b->t1, b->lanes, 1, l->GR, l->ld, S, l->ld, -1);
        W += size, S += size;
    }
}

/* What the queries find; base: M_0, which W is the difference to, or NULL. Fills Z, query_hidden, scores, ZW, ZS and
b->out. */
static void read(Block *b, const real *W, const real *S, const real *base) {
    int lanes = b->lanes, last = b->layers - 1;
    memcpy(b->layer[0].Z, b->q, (size_t)b->D * lanes * sizeof(real));
    for (int n = 0; n <= last; n++) {
        Layer *l = &b->layer[n];
        const Gates *g = gate(b, n);
        real *z = n < last ? l->query_hidden : b->z;
        product(l->out, lanes, l->in, W, 1, l->ld, l->Z, lanes, l->ZW, lanes, 0);
        product(l->out, lanes, l->in, S, 1, l->ld, l->Z, lanes, l->ZS, lanes, 0);
        product(b->c, lanes, l->in, l->X, 1, lanes, l->Z, lanes, l->scores, lanes, 0);
        for (int i = 0; i < b->c * lanes; i += LANES) AT(b->t1, i) = CONST_AT(l->scores, i) * CONST_AT(g->mix_T, i);
        for (int i = 0; i < l->out; i++)
            for (int t = 0; t < lanes; t += LANES)
                AT(z, i * lanes + t) = CONST_AT(l->ZW, i * lanes + t) * CONST_AT(g->A, t) +
                                       CONST_AT(l->ZS, i * lanes + t) * CONST_AT(g->B, t);
        product(l->out, lanes, b->c, l->G, lanes, 1, b->t1, lanes, z, lanes, -1);
        int64_t size = (int64_t)l->in * l->ld;
        if (base) product(l->out, lanes, l->in, base, 1, l->ld, l->Z, lanes, z, lanes, 1), base += size;
        if (n < last) activate(b->activation, l->out * lanes, z, b->layer[n + 1].Z, NULL);
        W += size, S += size;
    }
    if (b->norm) normalise(b->D, lanes, b->z, b->query);
    for (int i = 0; i < b->D; i++)
        for (int t = i * lanes; t < (i + 1) * lanes; t += LANES) {
            vec y = CONST_AT(b->norm ? b->query.unit : b->z, t);
            if (b->norm) y = y * b->gamma[i] + b->beta[i];
            if (b->residual) y += CONST_AT(b->q, t);
            AT(b->out, t) = y;
        }
}

/* out = upstream * act'(z) */
static void pull_back(int kind, int count, const real *z, const real *upstream, real *out) {
    for (int i = 0; i < count; i += LANES) {
        vec x = CONST_AT(z, i), s;
        if (kind == GELU) {
            vec below, density;
            normal(x, &below, &density);
            s = below + x * density;
        } else if (kind == SILU) {
            vec y = share(x);
            s = y * (1 + x * (1 - y));
        } else {
            s = choose(x > 0, x * 0 + 1, x * 0);
        }
        AT(out, i) = CONST_AT(upstream, i) * s;
    }
}

/* sums of products over features, one for each token, are added to (or, sign < 0, taken from) out. */
static void inner(const Block *b, int features, const real *x, const real *y, real *out, int sign) {
    for (int t = 0; t < b->lanes; t += LANES) {
        vec sum = {0};
        for (int i = 0; i < features; i++) sum += CONST_AT(x, i * b->lanes + t) * CONST_AT(y, i * b->lanes + t);
        AT(out, t) = sign > 0 ? CONST_AT(out, t) + sum : CONST_AT(out, t) - sum;
    }
}

/* dW, dS: gradients of a layer's last W and S -> of the first ones, but for what the queries add. */
static void state_back(int64_t size, const real *W, const real *S, real a, real from_s, real m, real *dW, real *dS,
                       real *d_a, real *d_b, real *d_m) {
    vec of_a = {0}, of_b = {0}, of_m = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vec w = CONST_AT(dW, i), s = CONST_AT(dS, i);
        of_a += w * CONST_AT(W, i);
        of_b += w * CONST_AT(S, i);
        of_m += s * CONST_AT(S, i);
        AT(dW, i) = a * w;
        AT(dS, i) = from_s * w + m * s;
    }
    *d_a += total(of_a), *d_b += total(of_b), *d_m += total(of_m);
}

/* Everything of a block after key_side and read: b->d_out is given; W, S, F, base: as those had them. dW, dS: gradients
of the weights after the block, then of those before it; dF, d_base are added to. Leaves d_q, d_k, d_v, d_mix (T), d_A,
d_B, d_m, d_e; a, b and p are within A, B and mix. */
static void backward(Block *b, const real *W, const real *S, const real *F, const real *base, real *dW, real *dS,
                     real *dF, real *d_base) {
    int lanes = b->lanes, c = b->c, D = b->D, last = b->layers - 1;
    size_t rest = (size_t)(lanes - c) * lanes * sizeof(real);
    int64_t at[MAX_LAYERS];
    at[0] = 0;
    for (int n = 0; n < last; n++) at[n + 1] = at[n] + (int64_t)b->layer[n].in * b->layer[n].ld;
    for (int n = 0; n < b->gate_layers; n++) {
        memset(b->d_mix[n], 0, (size_t)lanes * lanes * sizeof(real));
        memset(b->d_A[n], 0, lanes * sizeof(real));
        memset(b->d_B[n], 0, lanes * sizeof(real));
        memset(b->d_e[n], 0, lanes * sizeof(real));
        b->d_m[n] = 0;
    }

    real *dz = b->z, *dZ = b->t3;
    for (int i = 0; i < D; i++) {
        vec of_gamma = {0}, of_beta = {0};
        for (int t = i * lanes; t < (i + 1) * lanes; t += LANES) {
            vec d = CONST_AT(b->d_out, t);
            AT(b->d_q, t) = d * (real)b->residual;
            if (b->norm) of_gamma += d * CONST_AT(b->query.unit, t), of_beta += d, d *= b->gamma[i];
            AT(dz, t) = d;
        }
        if (b->norm) b->d_gamma[i] += total(of_gamma), b->d_beta[i] += total(of_beta);
    }
    if (b->norm) normalise_back(D, lanes, dz, b->query, dz);
    for (int n = last; n >= 0; n--) {
        Layer *l = &b->layer[n];
        const Gates *g = gate(b, n);
        int of = b->gate_layers > 1 ? n : 0;
        int64_t size = (int64_t)l->in * l->ld;
        real *dw = dW + at[n], *ds = dS + at[n];
        inner(b, l->out, dz, l->ZW, b->d_A[of], 1);
        inner(b, l->out, dz, l->ZS, b->d_B[of], 1);
        product(c, lanes, l->out, l->G, 1, lanes, dz, lanes, b->square, lanes, 0);
        for (int i = 0; i < c * lanes; i += LANES) {
            vec d = -CONST_AT(b->square, i), s = CONST_AT(l->scores, i), mix = CONST_AT(g->mix_T, i);
            AT(b->d_scores_T, i) = d * mix;
            AT(b->mixed_T, i) = s * mix;
            AT(b->d_mix[of], i) += d * s;
        }
        memset(b->d_scores_T + c * lanes, 0, rest);
        memset(b->mixed_T + c * lanes, 0, rest);
        transpose(b->d_scores_T, lanes, lanes, lanes, b->d_scores, lanes);
        transpose(b->mixed_T, lanes, lanes, lanes, b->mixed, lanes);
        memset(l->dG, 0, (size_t)l->out * lanes * sizeof(real));
        product(l->out, lanes, c, dz, lanes, 1, b->mixed, lanes, l->dG, lanes, -1);
        product(l->in, lanes, c, l->Z, lanes, 1, b->d_scores, lanes, l->dX, lanes, 0);
        scaled(b, l->out, dz, g->A, b->t1);
        product(l->in, lanes, l->out, W + at[n], l->ld, 1, b->t1, lanes, dZ, lanes, 0);
        scaled(b, l->out, dz, g->B, b->t1);
        product(l->in, lanes, l->out, S + at[n], l->ld, 1, b->t1, lanes, dZ, lanes, 1);
        product(l->in, lanes, c, l->X, lanes, 1, b->d_scores_T, lanes, dZ, lanes, 1);
        if (base) product(l->in, lanes, l->out, base + at[n], l->ld, 1, dz, lanes, dZ, lanes, 1);

        /* What the new weights say about the keys. */
        product(l->out, lanes, l->in, dw, 1, l->ld, l->X, lanes, b->t1, lanes, 0);
        product(l->out, lanes, l->in, ds, 1, l->ld, l->X, lanes, b->t2, lanes, 0);
        memset(b->square, 0, lanes * sizeof(real));
        inner(b, l->out, l->G, b->t1, b->square, -1);
        for (int t = 0; t < c; t++) b->d_mix[of][t * lanes + c - 1] += b->square[t];
        inner(b, l->out, l->G, b->t2, b->d_e[of], -1);
        for (int i = 0; i < l->out; i++)
            for (int t = 0; t < lanes; t += LANES)
                AT(l->dG, i * lanes + t) -= CONST_AT(b->t1, i * lanes + t) * CONST_AT(g->p, t) +
                                            CONST_AT(b->t2, i * lanes + t) * CONST_AT(g->e, t);
        scaled(b, l->out, l->G, g->p, b->t1);
        product(l->in, lanes, l->out, dw, l->ld, 1, b->t1, lanes, l->dX, lanes, -1);
        scaled(b, l->out, l->G, g->e, b->t1);
        product(l->in, lanes, l->out, ds, l->ld, 1, b->t1, lanes, l->dX, lanes, -1);

        state_back(size, W + at[n], S + at[n], g->A[c - 1], g->B[c - 1], g->m[c - 1], dw, ds, &b->d_A[of][c - 1],
                   &b->d_B[of][c - 1], &b->d_m[of]);
        by_token(b, l->out, dz, NULL, b->r);
        if (base) product(l->in, l->ld, c, l->Z, lanes, 1, b->r, l->ld, d_base + at[n], l->ld, 1);
        scaled(b, l->in, l->Z, g->A, b->t1);
        product(l->in, l->ld, c, b->t1, lanes, 1, b->r, l->ld, dw, l->ld, 1);
        scaled(b, l->in, l->Z, g->B, b->t1);
        product(l->in, l->ld, c, b->t1, lanes, 1, b->r, l->ld, ds, l->ld, 1);
        if (n) {
            pull_back(b->activation, l->in * lanes, b->layer[n - 1].query_hidden, dZ, dz);
        } else {
            for (int i = 0; i < D * lanes; i += LANES) AT(b->d_q, i) += CONST_AT(dZ, i);
        }
    }

    /* The inner gradient, differentiated. */
    for (int n = 0; n < last; n++) {
        Layer *l = &b->layer[n], *above = l + 1;
        int count = l->out * lanes;
        for (int i = 0; i < count; i += LANES) AT(b->t1, i) = CONST_AT(l->dG, i) * CONST_AT(l->slope, i);
        curve(b->activation, count, l->hidden, l->dG, l->pulled, l->d_hidden);
        product(above->out, lanes, above->in, F + at[n + 1], 1, above->ld, b->t1, lanes, above->dG, lanes, 1);
        product(above->in, above->ld, c, b->t1, lanes, 1, above->GR, above->ld, dF + at[n + 1], above->ld, 1);
    }
    Layer *l = &b->layer[last];
    real *df = b->t2, *spare = b->t3;
    if (b->norm) {
        normalise_back(D, lanes, l->dG, b->key, b->t1);
        for (int t = 0; t < lanes; t += LANES) {
            vec flat = {0}, tilt = {0}, along = {0}, scale = CONST_AT(b->key.scale, t);
            for (int i = 0; i < D; i++) {
                vec unit = CONST_AT(b->key.unit, i * lanes + t), d = CONST_AT(l->dG, i * lanes + t);
                flat += CONST_AT(b->error, i * lanes + t) * b->gamma[i] * unit;
                tilt += d * unit;
                along += d * CONST_AT(l->G, i * lanes + t);
            }
            scale /= (real)D;
            flat *= scale, tilt *= scale;
            AT(b->square, t) = along * scale;
            for (int i = 0; i < D; i++) {
                real gamma = b->gamma[i];
                vec d_y = 2 * gamma * CONST_AT(b->t1, i * lanes + t);
                AT(b->d_v, i * lanes + t) = -d_y;
                AT(df, i * lanes + t) = d_y * gamma - CONST_AT(l->dG, i * lanes + t) * flat -
                                        CONST_AT(b->error, i * lanes + t) * gamma * tilt;
            }
        }
        for (int i = 0; i < D; i++) {
            vec of_gamma = {0}, of_beta = {0};
            for (int t = i * lanes; t < (i + 1) * lanes; t += LANES) {
                vec d_y = -CONST_AT(b->d_v, t);
                of_gamma += CONST_AT(b->t1, t) * CONST_AT(b->error, t) + d_y * CONST_AT(b->key.unit, t);
                of_beta += d_y;
            }
            b->d_gamma[i] += total(of_gamma), b->d_beta[i] += total(of_beta);
        }
        normalise_back(D, lanes, df, b->key, df);
        for (int i = 0; i < D; i++)
            for (int t = 0; t < lanes; t += LANES)
                AT(df, i * lanes + t) -= CONST_AT(b->key.unit, i * lanes + t) * CONST_AT(b->square, t);
    } else {
        for (int i = 0; i < D * lanes; i += LANES) {
            AT(df, i) = 2 * CONST_AT(l->dG, i);
            AT(b->d_v, i) = -CONST_AT(df, i);
        }
    }
    for (int n = last; n >= 0; n--) {
        l = &b->layer[n];
        by_token(b, l->out, df, NULL, b->r);
        product(l->in, l->ld, c, l->X, lanes, 1, b->r, l->ld, dF + at[n], l->ld, 1);
        product(l->in, lanes, l->out, F + at[n], l->ld, 1, df, lanes, l->dX, lanes, 1);
        if (n) {
            Layer *below = l - 1;
            for (int i = 0; i < l->in * lanes; i += LANES)
                AT(spare, i) = CONST_AT(below->d_hidden, i) + CONST_AT(l->dX, i) * CONST_AT(below->slope, i);
            real *swap = df;
            df = spare, spare = swap;
        }
    }
    for (int i = 0; i < D * lanes; i += LANES)
        AT(b->d_k, i) = CONST_AT(l->dX, i) - CONST_AT(b->d_v, i) * (real)b->residual;
}

/* ---- all blocks of some rows */

/* What every call is given: pointers to contiguous tensors; of weights one for each layer, (rows, d_in, d_out). W is the
memory's weights, whatever they are forgotten to; begin: M_0. */
typedef struct {
    const real *q, *k, *v;                   /* laid out as Call says, as are results and gradients of their kind */
    const real *theta, *eta, *alpha, *valid; /* likewise; valid (blocks, rows, tokens) */
    const real *gamma, *beta;                /* (rows, width) */
    const uint8_t *new_chunk, *new_document; /* (blocks, rows) */
    real *begin[MAX_LAYERS], *W[MAX_LAYERS], *S[MAX_LAYERS], *F[MAX_LAYERS];
    real *kept; /* (groups, rows, 3, one weight set as it is here) */
} Inputs;

typedef struct {
    real *out;
    real *W[MAX_LAYERS], *S[MAX_LAYERS], *F[MAX_LAYERS];
} Outputs;

/* W, S, F: of the state after the last token on entry, before the first one on return. begin: (rows, ...), added to. */
typedef struct {
    const real *out;
    real *q, *k, *v, *theta, *eta, *alpha, *gamma, *beta;
    real *begin[MAX_LAYERS], *W[MAX_LAYERS], *S[MAX_LAYERS], *F[MAX_LAYERS];
} Gradients;

static void pack(const Block *b, real *const *from, int64_t row, real *to) {
    for (int n = 0; n < b->layers; n++) {
        const Layer *l = &b->layer[n];
        const real *x = from[n] + row * l->in * l->out;
        for (int i = 0; i < l->in; i++, to += l->ld) {
            memcpy(to, x + (int64_t)i * l->out, l->out * sizeof(real));
            for (int j = l->out; j < l->ld; j++) to[j] = 0;
        }
    }
}

static void unpack(const Block *b, const real *from, int64_t row, real *const *to) {
    for (int n = 0; n < b->layers; n++) {
        const Layer *l = &b->layer[n];
        real *x = to[n] + row * l->in * l->out;
        for (int i = 0; i < l->in; i++, from += l->ld) memcpy(x + (int64_t)i * l->out, from, l->out * sizeof(real));
    }
}

static void add(int64_t size, real *to, const real *x) {
    for (int64_t i = 0; i < size; i += LANES) AT(to, i) += CONST_AT(x, i);
}

static void subtract(int64_t size, real *to, const real *x) {
    for (int64_t i = 0; i < size; i += LANES) AT(to, i) -= CONST_AT(x, i);
}

static int64_t place(const Call *call, int64_t n, int64_t row) {
    return row / call->heads * call->batch + row % call->heads * call->head + n * call->block;
}

static int64_t gate_place(const Call *call, int64_t n, int64_t row, int g) {
    return row / call->heads * call->gate_batch + row % call->heads * call->gate_head + n * call->gate_block +
           g * call->gate_layer;
}

static Given given(const Call *call, const Inputs *x, int64_t n, int64_t row, int g) {
    int64_t at = gate_place(call, n, row, g);
    const real *valid = x->valid ? x->valid + (n * call->rows + row) * call->tokens : NULL;
    return (Given){x->theta + at, x->eta + at, x->alpha + at, valid, call->gate_token};
}

/* What a block reads: its tokens, its gates. */
static void fetch(Block *b, const Call *call, const Inputs *x, int64_t n, int64_t row) {
    int64_t at = place(call, n, row);
    load_tokens(b, x->q + at, call->token, b->q);
    load_tokens(b, x->k + at, call->token, b->k);
    load_tokens(b, x->v + at, call->token, b->v);
    for (int g = 0; g < b->gate_layers; g++) gates(b->c, b->lanes, given(call, x, n, row, g), &b->gate[g]);
    b->gamma = x->gamma + row * call->width, b->beta = x->beta + row * call->width;
}

/* The state before a block -> at its start. base: M_0. */
static void start(Block *b, const Call *call, const Inputs *x, int64_t n, int64_t row, const real *base, real *W,
                  real *S, real *F) {
    size_t bytes = (size_t)b->state * sizeof(real);
    if (x->new_document[n * call->rows + row]) {
        if (b->to_start)
            memset(W, 0, bytes);
        else
            memcpy(W, base, bytes);
        memset(S, 0, bytes);
    }
    if (x->new_chunk[n * call->rows + row]) {
        memcpy(F, W, bytes);
        if (b->to_start) add(b->state, F, base);
    }
}

/* Numbers of one weight set as it is in Inputs.kept. */
int64_t set_size(const Call *call) {
    Block b;
    return set_layer(call, &b);
}

int forward(const Call *call, const Inputs *x, const Outputs *y, int64_t first, int64_t last) {
    Block b;
    Arena arena = {0};
    int64_t state = set_layer(call, &b);
    lay_out(&b, &arena);
    int64_t scratch = arena.next - (real *)0;
    if (posix_memalign((void **)&arena.begin, 64, (size_t)(scratch + 4 * state) * sizeof(real))) return 1;
    memset(arena.begin, 0, (size_t)(scratch + 4 * state) * sizeof(real));
    arena.next = arena.begin;
    lay_out(&b, &arena);
    real *W = arena.next, *S = W + state, *F = S + state, *base = F + state;
    for (int64_t row = first; row < last; row++) {
        pack(&b, x->W, row, W);
        pack(&b, x->S, row, S);
        pack(&b, x->F, row, F);
        if (x->begin[0]) pack(&b, x->begin, row, base);
        if (b.to_start) subtract(state, W, base);
        for (int64_t n = 0; n < call->blocks; n++) {
            if (call->every && n % call->every == 0) {
                real *to = x->kept + (n / call->every * call->rows + row) * 3 * state;
                memcpy(to, W, (size_t)(3 * state) * sizeof(real)); /* S and F lie behind W */
            }
            start(&b, call, x, n, row, base, W, S, F);
            fetch(&b, call, x, n, row);
            key_side(&b, F);
            read(&b, W, S, b.to_start ? base : NULL);
            store_tokens(&b, b.out, call->token, y->out + place(call, n, row));
            write(&b, W, S);
        }
        if (b.to_start) add(state, W, base);
        unpack(&b, W, row, y->W);
        unpack(&b, S, row, y->S);
        if (y->F[0]) unpack(&b, F, row, y->F); /* who knows where chunks begin need not be told */
    }
    free(arena.begin);
    return 0;
}

int reverse(const Call *call, const Inputs *x, const Gradients *d, int64_t first, int64_t last) {
    Block b;
    Arena arena = {0};
    int64_t state = set_layer(call, &b);
    lay_out(&b, &arena);
    int64_t scratch = arena.next - (real *)0, sets = 5 + 3 * (call->every + 1);
    if (posix_memalign((void **)&arena.begin, 64, (size_t)(scratch + sets * state) * sizeof(real))) return 1;
    memset(arena.begin, 0, (size_t)(scratch + sets * state) * sizeof(real));
    arena.next = arena.begin;
    lay_out(&b, &arena);
    real *dW = arena.next, *dS = dW + state, *dF = dS + state, *base = dF + state, *d_base = base + state;
    real *played = d_base + state;
    size_t bytes = (size_t)state * sizeof(real);
    for (int64_t row = first; row < last; row++) {
        pack(&b, d->W, row, dW);
        pack(&b, d->S, row, dS);
        pack(&b, d->F, row, dF);
        if (x->begin[0]) pack(&b, x->begin, row, base), pack(&b, d->begin, row, d_base);
        if (b.to_start) add(state, d_base, dW);
        b.d_gamma = d->gamma + row * call->width, b.d_beta = d->beta + row * call->width;
        for (int64_t group = (call->blocks - 1) / call->every; group >= 0; group--) {
            int64_t begin = group * call->every, end = begin + call->every;
            end = end < call->blocks ? end : call->blocks;
            memcpy(played, x->kept + (group * call->rows + row) * 3 * state, 3 * bytes);
            for (int64_t n = begin; n < end; n++) {
                real *W = played + (n - begin) * 3 * state, *S = W + state, *F = S + state;
                start(&b, call, x, n, row, base, W, S, F);
                if (n + 1 == end) break;
                memcpy(W + 3 * state, W, 3 * bytes);
                fetch(&b, call, x, n, row);
                key_side(&b, F);
                write(&b, W + 3 * state, S + 3 * state);
            }
            for (int64_t n = end - 1; n >= begin; n--) {
                real *W = played + (n - begin) * 3 * state, *S = W + state, *F = S + state;
                int64_t at = place(call, n, row);
                const real *from = b.to_start ? base : NULL;
                fetch(&b, call, x, n, row);
                load_tokens(&b, d->out + at, call->token, b.d_out);
                key_side(&b, F);
                read(&b, W, S, from);
                backward(&b, W, S, F, from, dW, dS, dF, d_base);
                store_tokens(&b, b.d_q, call->token, d->q + at);
                store_tokens(&b, b.d_k, call->token, d->k + at);
                store_tokens(&b, b.d_v, call->token, d->v + at);
                for (int g = 0; g < b.gate_layers; g++) {
                    int64_t here = gate_place(call, n, row, g);
                    real *to[] = {d->theta + here, d->eta + here, d->alpha + here}, part[3][b.lanes];
                    memset(part, 0, sizeof part);
                    transpose(b.d_mix[g], b.lanes, b.lanes, b.lanes, b.square, b.lanes);
                    gates_back(b.c, b.lanes, given(call, x, n, row, g), &b.gate[g], b.square, b.d_A[g], b.d_B[g],
                               b.d_m[g], b.d_e[g], part[0], part[1], part[2]);
                    for (int i = 0; i < 3; i++)
                        for (int t = 0; t < b.c; t++) to[i][t * call->gate_token] = part[i][t];
                }
                if (x->new_chunk[n * call->rows + row]) {
                    add(state, dW, dF);
                    if (b.to_start) add(state, d_base, dF);
                    memset(dF, 0, bytes);
                }
                if (x->new_document[n * call->rows + row]) {
                    if (!b.to_start) add(state, d_base, dW);
                    memset(dW, 0, bytes);
                    memset(dS, 0, bytes);
                }
            }
        }
        if (b.to_start) subtract(state, d_base, dW);
        unpack(&b, dW, row, d->W);
        unpack(&b, dS, row, d->S);
        unpack(&b, dF, row, d->F);
        if (x->begin[0]) unpack(&b, d_base, row, d->begin);
    }
    free(arena.begin);
    return 0;
}
