/* The memory's recurrence over blocks on a CPU: the dual form of dual.py, forward and backward, one row at a time. The
gates enter as coefficients (coefficients.py).

A row is one head of one batch row; its weights stay in the core's cache while its blocks are processed. Names are those
of dual.py. Activations are stored feature by feature, "T": (features x tokens), tokens padded to whole vectors. The
values of one token (gates, LayerNorm statistics) are then in one lane of a vector. Sums over tokens need a matrix token
by token, "R": (tokens x features).

Compiled once per machine for REAL = float or double (native.py), called through ctypes. */

#include "network.h"

#if BYTES == 64
#define REGISTERS 24
#else
#define REGISTERS 12
#endif
#define STEP (LANES < 4 ? 4 : LANES)
#define PAD(n) (((n) + STEP - 1) / STEP * STEP)

/* Place of row r's token t of block n, in numbers: r / heads * batch + r % heads * head + n * block + t * token. */
typedef struct {
    int64_t heads, batch, head, block, token;
} Places;

/* Parameters of every call; native/__init__.py has the same fields. A block has one query per token and, for a rule
with a window, more keys than queries. */
typedef struct {
    int64_t blocks, rows, tokens, keys, layers, width, hidden, gate_layers;
    int64_t activation, norm, residual, to_start, loss;
    int64_t at_start; /* queries read the weights of their chunk's start */
    int64_t erases;   /* tokens erase before they write; keys are then the tokens */
    int64_t silent;   /* nothing is read: queries and outputs are not used */
    int64_t every;    /* blocks between two states that are kept for the backward pass; 0: none is kept */
    Places query, key;
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
    real *unit, *scale; /* (D x tokens), (tokens): output before the affine part; 1 / standard deviation */
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

/* ---- one block */

/* A layer's coefficients in a block, or their gradients. A, B: (lanes), weights of the block's first M and S in M_t.
mix_T: (keys x lanes), weight of each key's gradient in M_t. p, e: (key lanes), the same for the last M and the last S.
a, b, m: weights of the first M and S in the last M, and of the first S in the last S. */
typedef struct {
    real *A, *B, *mix_T, *p, *e;
    real a, b, m;
} Gates;

/* Inputs of a rule that erases besides its coefficients, which are then for theta = 1, or the inputs' gradients; see
erasure.py. theta, keep: (lanes). reach_T: (tokens x lanes), [i, t]. */
typedef struct {
    real *theta, *keep, *reach_T;
} Erasing;

/* A layer's intermediates of erasing, and their gradients. step: theta / (1 + theta |x|^2), (lanes). erased_T: reach_T
times step. alike: x_i . x_t. Token by token: along_W and along_S, x^T W and x^T S; known, the right side of the system of
erasure.py; rows, its solution y. */
typedef struct {
    real *step, *erased_T, *alike, *along_W, *along_S, *known, *rows, *d_erased_T, *d_rows, *d_alike;
} Erased;

/* A layer's intermediates; see dual.py. GR is G token by token. For keys: X, G, hidden, slope, pulled and their
gradients; for queries: Z, query_hidden, ZW, ZS; scores (keys x query lanes). gate, d_gate: the layer's coefficients and
their gradients. */
typedef struct {
    int in, out, ld; /* features in and out; row length of the weights */
    real *X, *G, *hidden, *slope, *pulled, *Z, *query_hidden, *scores, *ZW, *ZS, *GR;
    real *dX, *dG, *d_hidden; /* of the backward pass */
    Gates gate, d_gate;
    Erased erased;
} Layer;

typedef struct {
    int c, lanes, keys, key_lanes, layers, D, activation, norm, residual, gate_layers, to_start, loss, at_start,
        erases, silent, pairs; /* pairs: whether coefficients cover all tokens, not only the last */
    int64_t state; /* numbers of one weight set, padded */
    Layer layer[MAX_LAYERS];
    Unit key, query;
    Gates gate[MAX_LAYERS], d_gate[MAX_LAYERS]; /* as given, for one layer or for all */
    Erasing erasing[MAX_LAYERS], d_erasing[MAX_LAYERS];
    real *q, *k, *v, *error, *top, *f, *z, *out, *t1, *t2, *t3, *r; /* temporary T and R matrices of any size in use */
    real *mixed, *mixed_T, *d_scores, *d_scores_T, *square;        /* (tokens x keys), T (keys x tokens) */
    real *threshold, *d_threshold;                                 /* (key lanes), of losses that have one */
    real *d_out, *d_q, *d_k, *d_v;
    const real *gamma, *beta; /* (D) */
    real *d_gamma, *d_beta;   /* (D) */
} Block;

static int64_t set_layer(const Call *call, Block *b) {
    int64_t at = 0;
    b->c = call->tokens, b->lanes = PAD(call->tokens), b->layers = call->layers, b->D = call->width;
    b->keys = call->keys, b->key_lanes = PAD(call->keys);
    b->activation = call->activation, b->norm = call->norm, b->residual = call->residual;
    b->gate_layers = call->gate_layers, b->to_start = call->to_start;
    b->loss = call->loss, b->at_start = call->at_start, b->erases = call->erases;
    b->silent = call->silent, b->pairs = !b->at_start || b->erases;
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

/* Lays out a block's matrices; without memory in the arena (begin is NULL) it only counts their size. */
static void lay_out(Block *b, Arena *a) {
    int lanes = b->lanes, keys = b->key_lanes, more = lanes > keys ? lanes : keys, widest = b->D;
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        widest = l->in > widest ? l->in : widest, widest = l->out > widest ? l->out : widest;
    }
    int64_t wide = (int64_t)UP4(widest) * more, square = b->pairs ? (int64_t)keys * lanes : 0;
    wide = wide > square ? wide : square;
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        int inner = n + 1 < b->layers ? UP4(l->out) : 0;
        real **key_in[] = {&l->X, &l->dX}, **key_out[] = {&l->G, &l->dG};
        real **key_inner[] = {&l->hidden, &l->slope, &l->pulled, &l->d_hidden}, **query_out[] = {&l->ZW, &l->ZS};
        for (int i = 0; i < 2; i++) *key_in[i] = take(a, (int64_t)UP4(l->in) * keys);
        for (int i = 0; i < 2; i++) *key_out[i] = take(a, (int64_t)UP4(l->out) * keys);
        for (int i = 0; i < 4; i++) *key_inner[i] = take(a, (int64_t)inner * keys);
        for (int i = 0; i < 2; i++) *query_out[i] = take(a, (int64_t)UP4(l->out) * lanes);
        l->Z = take(a, (int64_t)UP4(l->in) * lanes);
        l->query_hidden = take(a, (int64_t)inner * lanes);
        l->scores = take(a, square);
        l->GR = take(a, (int64_t)keys * PAD(l->out));
        if (!b->erases) continue;
        Erased *e = &l->erased;
        real **by_pair[] = {&l->gate.mix_T, &l->d_gate.mix_T, &e->erased_T, &e->alike, &e->d_erased_T, &e->d_alike};
        real **by_line[] = {&e->along_W, &e->along_S, &e->known, &e->rows, &e->d_rows};
        real **by_key[] = {&l->gate.p, &l->gate.e, &l->d_gate.p, &l->d_gate.e, &e->step};
        for (int i = 0; i < 6; i++) *by_pair[i] = take(a, square);
        for (int i = 0; i < 5; i++) *by_line[i] = take(a, (int64_t)keys * PAD(l->out));
        for (int i = 0; i < 5; i++) *by_key[i] = take(a, keys);
    }
    b->key = (Unit){take(a, (int64_t)UP4(b->D) * keys), take(a, keys)};
    b->query = (Unit){take(a, (int64_t)UP4(b->D) * lanes), take(a, lanes)};
    for (int n = 0; n < 2 * b->gate_layers; n++) {
        Gates *g = n % 2 ? &b->d_gate[n / 2] : &b->gate[n / 2];
        g->A = take(a, lanes), g->B = take(a, lanes), g->mix_T = take(a, square);
        g->p = take(a, keys), g->e = take(a, keys);
        if (!b->erases) continue;
        Erasing *e = n % 2 ? &b->d_erasing[n / 2] : &b->erasing[n / 2];
        e->theta = take(a, keys), e->keep = take(a, keys), e->reach_T = take(a, square);
    }
    b->threshold = take(a, keys), b->d_threshold = take(a, keys);
    real **of_queries[] = {&b->q, &b->out, &b->d_out, &b->d_q};
    for (int i = 0; i < 4; i++) *of_queries[i] = take(a, (int64_t)UP4(b->D) * lanes);
    real **of_keys[] = {&b->k, &b->v, &b->error, &b->top, &b->f, &b->d_k, &b->d_v};
    for (int i = 0; i < 7; i++) *of_keys[i] = take(a, (int64_t)UP4(b->D) * keys);
    real **any[] = {&b->z, &b->t1, &b->t2, &b->t3};
    for (int i = 0; i < 4; i++) *any[i] = take(a, wide);
    b->r = take(a, (int64_t)more * PAD(widest));
    real **squares[] = {&b->mixed, &b->mixed_T, &b->d_scores, &b->d_scores_T};
    for (int i = 0; i < 4; i++) *squares[i] = take(a, square);
    b->square = take(a, square > keys ? square : keys);
}

/* Tokens in the caller's layout <-> (D x lanes). */
static void load_tokens(int D, int count, int lanes, const real *from, int64_t step, real *to) {
    for (int i = 0; i < D; i++) {
        for (int t = 0; t < count; t++) to[i * lanes + t] = from[t * step + i];
        for (int t = count; t < lanes; t++) to[i * lanes + t] = 0;
    }
}

static void store_tokens(int D, int count, int lanes, const real *from, int64_t step, real *to) {
    for (int t = 0; t < count; t++)
        for (int i = 0; i < D; i++) to[t * step + i] = from[i * lanes + t];
}

/* to = from, transposed to (tokens x features). */
static void by_token(int features, int count, int lanes, const real *from, real *to) {
    int ld = PAD(features);
    transpose(from, lanes, UP4(features), lanes, to, ld);
    for (int t = 0; t < count; t++)
        for (int i = features; i < ld; i++) to[t * ld + i] = 0;
}

/* out = from scaled token by token. */
static void scaled(int features, int lanes, const real *from, const real *scale, real *out) {
    for (int i = 0; i < features; i++)
        for (int t = 0; t < lanes; t += LANES)
            AT(out, i * lanes + t) = CONST_AT(from, i * lanes + t) * CONST_AT(scale, t);
}

/* out = from scaled feature by feature. */
static void scaled_rows(int features, int lanes, const real *from, const real *scale, real *out) {
    for (int i = 0; i < features; i++)
        for (int t = i * lanes; t < (i + 1) * lanes; t += LANES) AT(out, t) = CONST_AT(from, t) * scale[i];
}

/* Adds each token's sum of products over features to out, or subtracts it (sign < 0). */
static void inner(int features, int lanes, const real *x, const real *y, real *out, int sign) {
    for (int t = 0; t < lanes; t += LANES) {
        vec sum = {0};
        for (int i = 0; i < features; i++) sum += CONST_AT(x, i * lanes + t) * CONST_AT(y, i * lanes + t);
        AT(out, t) = sign > 0 ? CONST_AT(out, t) + sum : CONST_AT(out, t) - sum;
    }
}

static int gate_layer(const Block *b, int n) { return b->gate_layers > 1 ? n : 0; }

INLINE void add_line(int count, real factor, const real *x, real *to) {
    for (int i = 0; i < count; i += LANES) AT(to, i) += factor * CONST_AT(x, i);
}

/* ---- the rule's loss of an error e; native/__init__.py has the same order */

enum { SQUARED, HUBER };

/* top (D x lanes), the loss's gradient, from e. */
static void loss(const Block *b, const real *e, real *top) {
    int D = b->D, lanes = b->key_lanes;
    for (int t = 0; t < lanes; t += LANES) {
        vec d = CONST_AT(b->threshold, t), square = {0}, factor = {0};
        if (b->loss == HUBER) {
            for (int i = 0; i < D; i++) square += CONST_AT(e, i * lanes + t) * CONST_AT(e, i * lanes + t);
            for (int j = 0; j < LANES; j++) {
                real size = sqrt(square[j]), bound = d[j] * sqrt(D);
                factor[j] = size <= bound ? 2 : 2 * bound / size;
            }
        }
        for (int i = 0; i < D; i++) {
            vec x = CONST_AT(e, i * lanes + t);
            if (b->loss == HUBER)
                x *= factor;
            else
                x *= 2;
            AT(top, i * lanes + t) = x;
        }
    }
}

/* From upstream, the gradient of top, to the gradients of e (out, which may be upstream) and of the threshold. */
static void loss_back(const Block *b, const real *e, const real *upstream, real *out) {
    int D = b->D, lanes = b->key_lanes;
    for (int t = 0; t < lanes; t += LANES) {
        vec d = CONST_AT(b->threshold, t), square = {0}, along = {0}, factor = {0}, turn = {0}, of_d = {0};
        if (b->loss == HUBER) {
            for (int i = 0; i < D; i++) {
                vec x = CONST_AT(e, i * lanes + t);
                square += x * x, along += x * CONST_AT(upstream, i * lanes + t);
            }
            for (int j = 0; j < LANES; j++) {
                real size = sqrt(square[j]), root_D = sqrt(D), bound = d[j] * root_D, beyond = size > bound;
                factor[j] = beyond ? 2 * bound / size : 2;
                turn[j] = beyond ? factor[j] * along[j] / square[j] : 0;
                of_d[j] = beyond ? 2 * along[j] / size * root_D : 0;
            }
        }
        for (int i = 0; i < D; i++) {
            vec x = CONST_AT(e, i * lanes + t), u = CONST_AT(upstream, i * lanes + t);
            if (b->loss == HUBER)
                u = factor * u - turn * x;
            else
                u *= 2;
            AT(out, i * lanes + t) = u;
        }
        AT(b->d_threshold, t) = of_d;
    }
}

/* ---- keys, writes, reads */

/* Rank-one factors of the inner gradient at F: fills X, hidden, slope, error, top, pulled, G, GR. */
static void key_side(Block *b, const real *F) {
    int lanes = b->key_lanes, last = b->layers - 1;
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
    for (int i = 0; i < b->D; i++) {
        real gamma = b->norm ? b->gamma[i] : 1, beta = b->norm ? b->beta[i] : 0;
        for (int t = i * lanes; t < (i + 1) * lanes; t += LANES) {
            vec y = CONST_AT(b->norm ? b->key.unit : b->f, t);
            if (b->norm) y = y * gamma + beta;
            if (b->residual) y += CONST_AT(b->k, t);
            AT(b->error, t) = y - CONST_AT(b->v, t);
        }
    }
    loss(b, b->error, b->top);
    real *g = b->layer[last].G;
    for (int i = 0; i < b->D; i++)
        for (int t = i * lanes; t < (i + 1) * lanes; t += LANES)
            AT(g, t) = CONST_AT(b->top, t) * (b->norm ? b->gamma[i] : 1);
    if (b->norm) normalise_back(b->D, lanes, g, b->key, g);
    for (int n = last; n >= 0; n--) {
        Layer *l = &b->layer[n];
        by_token(l->out, b->keys, lanes, l->G, l->GR);
        if (!n) break;
        Layer *below = &b->layer[n - 1];
        product(l->in, lanes, l->out, weights[n], l->ld, 1, l->G, lanes, below->pulled, lanes, 0);
        for (int i = 0; i < below->out * lanes; i += LANES)
            AT(below->G, i) = CONST_AT(below->pulled, i) * CONST_AT(below->slope, i);
    }
}

/* ---- erasing (erasure.py), between keys and writes, and its backward pass */

/* Sets each layer's coefficients: the given ones, multiplied by the steps if the rule erases. Fills gate and erased. W,
S: at the block's start. */
static void erase(Block *b, const real *W, const real *S) {
    int lanes = b->lanes, c = b->c;
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        const Gates *given = &b->gate[gate_layer(b, n)];
        if (!b->erases) {
            l->gate = *given, l->d_gate = b->d_gate[gate_layer(b, n)];
            continue;
        }
        const Erasing *own = &b->erasing[gate_layer(b, n)];
        Erased *e = &l->erased;
        Gates *g = &l->gate;
        g->A = given->A, g->B = given->B, g->a = given->a, g->b = given->b, g->m = given->m;
        l->d_gate.A = b->d_gate[gate_layer(b, n)].A, l->d_gate.B = b->d_gate[gate_layer(b, n)].B;
        memset(e->step, 0, lanes * sizeof(real));
        inner(l->in, lanes, l->X, l->X, e->step, 1);
        for (int i = 0; i < lanes; i++) e->step[i] = own->theta[i] / (1 + own->theta[i] * e->step[i]);
        for (int i = 0; i < c; i++)
            for (int t = 0; t < lanes; t += LANES) {
                AT(g->mix_T, i * lanes + t) = CONST_AT(given->mix_T, i * lanes + t) * e->step[i];
                AT(e->erased_T, i * lanes + t) = CONST_AT(own->reach_T, i * lanes + t) * e->step[i];
            }
        for (int i = 0; i < lanes; i += LANES) {
            AT(g->p, i) = CONST_AT(given->p, i) * CONST_AT(e->step, i);
            AT(g->e, i) = CONST_AT(given->e, i) * CONST_AT(e->step, i);
        }
        product(c, lanes, l->in, l->X, 1, lanes, l->X, lanes, e->alike, lanes, 0);
        product(c, l->ld, l->in, l->X, 1, lanes, W, l->ld, e->along_W, l->ld, 0);
        product(c, l->ld, l->in, l->X, 1, lanes, S, l->ld, e->along_S, l->ld, 0);
        for (int t = 0; t < c; t++) {
            real *known = e->known + t * l->ld, *row = e->rows + t * l->ld;
            memset(known, 0, l->ld * sizeof(real));
            memset(row, 0, l->ld * sizeof(real));
            add_line(l->ld, t ? g->A[t - 1] : 1, e->along_W + t * l->ld, known);
            if (t) add_line(l->ld, g->B[t - 1], e->along_S + t * l->ld, known);
            for (int i = 0; i < t; i++)
                add_line(l->ld, -g->mix_T[i * lanes + t - 1] * e->alike[i * lanes + t], l->GR + i * l->ld, known);
            add_line(l->ld, own->keep[t], known, row);
            for (int i = 0; i < t; i++)
                add_line(l->ld, -e->erased_T[i * lanes + t] * e->alike[i * lanes + t], e->rows + i * l->ld, row);
        }
        int64_t size = (int64_t)l->in * l->ld;
        W += size, S += size;
    }
}

/* Gradients of the erased rows through the new W. dw: the gradient of W. */
static void write_back(Block *b, int n, const real *dw) {
    Layer *l = &b->layer[n];
    Erased *e = &l->erased;
    int lanes = b->lanes, c = b->c;
    product(c, l->ld, l->in, l->X, 1, lanes, dw, l->ld, b->r, l->ld, 0);
    for (int i = 0; i < c; i++) {
        real share = e->erased_T[i * lanes + c - 1];
        e->d_erased_T[i * lanes + c - 1] -= dot(e->rows + i * l->ld, b->r + i * l->ld, l->ld);
        add_line(l->ld, -share, b->r + i * l->ld, e->d_rows + i * l->ld);
    }
    load_tokens(1, c, lanes, e->erased_T + c - 1, lanes, b->square);
    transpose(e->rows, l->ld, lanes, UP4(l->out), b->t1, lanes);
    scaled(l->out, lanes, b->t1, b->square, b->t1);
    product(l->in, lanes, l->out, dw, l->ld, 1, b->t1, lanes, l->dX, lanes, -1);
}

/* From the gradients of rows, erased_T and the layer's own coefficients to the gradients of the given inputs; adds to
dX, dG, dw and ds. W, S: the layer's, at the block's start; dw, ds: their gradients. */
static void erase_back(Block *b, int n, const real *W, const real *S, real *dw, real *ds) {
    Layer *l = &b->layer[n];
    Erased *e = &l->erased;
    int lanes = b->lanes, c = b->c, ld = l->ld;
    const Gates *g = &l->gate, *given = &b->gate[gate_layer(b, n)];
    const Erasing *own = &b->erasing[gate_layer(b, n)];
    Gates *d = &l->d_gate, *d_given = &b->d_gate[gate_layer(b, n)];
    Erasing *d_own = &b->d_erasing[gate_layer(b, n)];
    real *dGR = b->r;
    memset(dGR, 0, (size_t)lanes * ld * sizeof(real));
    memset(e->d_alike, 0, (size_t)lanes * lanes * sizeof(real));
    for (int i = 0; i < c; i++) d->mix_T[i * lanes + c - 1] += d->p[i];
    for (int t = c - 1; t >= 0; t--) {
        real *d_row = e->d_rows + t * ld, *d_known = e->known + t * ld; /* known is overwritten */
        for (int i = 0; i < t; i++) {
            real of_pair = -dot(d_row, e->rows + i * ld, ld), alike = e->alike[i * lanes + t];
            e->d_erased_T[i * lanes + t] += of_pair * alike;
            e->d_alike[i * lanes + t] += of_pair * e->erased_T[i * lanes + t];
            add_line(ld, -e->erased_T[i * lanes + t] * alike, d_row, e->d_rows + i * ld);
        }
        d_own->keep[t] += dot(d_row, d_known, ld);
        for (int j = 0; j < ld; j += LANES) AT(d_known, j) = own->keep[t] * CONST_AT(d_row, j);
        if (t) {
            d->A[t - 1] += dot(d_known, e->along_W + t * ld, ld);
            d->B[t - 1] += dot(d_known, e->along_S + t * ld, ld);
        }
        for (int i = 0; i < t; i++) {
            real of_pair = -dot(d_known, l->GR + i * ld, ld);
            real mix = g->mix_T[i * lanes + t - 1], alike = e->alike[i * lanes + t];
            d->mix_T[i * lanes + t - 1] += of_pair * alike;
            e->d_alike[i * lanes + t] += of_pair * mix;
            add_line(ld, -mix * alike, d_known, dGR + i * ld);
        }
        /* In place: the gradients of along_W and along_S. */
        for (int j = 0; j < ld; j += LANES) {
            vec d_along = CONST_AT(d_known, j);
            AT(e->along_W, t * ld + j) = d_along * (t ? g->A[t - 1] : 1);
            AT(e->along_S, t * ld + j) = d_along * (t ? g->B[t - 1] : 0);
        }
    }
    for (int i = 0; i < c; i++)
        for (int j = 0; j < l->out; j++) l->dG[j * lanes + i] += dGR[i * ld + j];
    product(l->in, ld, c, l->X, lanes, 1, e->along_W, ld, dw, ld, 1);
    product(l->in, ld, c, l->X, lanes, 1, e->along_S, ld, ds, ld, 1);
    transpose(e->along_W, ld, lanes, UP4(l->out), b->t1, lanes);
    product(l->in, lanes, l->out, W, ld, 1, b->t1, lanes, l->dX, lanes, 1);
    transpose(e->along_S, ld, lanes, UP4(l->out), b->t1, lanes);
    product(l->in, lanes, l->out, S, ld, 1, b->t1, lanes, l->dX, lanes, 1);
    for (int i = 0; i < c; i++)
        for (int t = i + 1; t < c; t++) e->d_alike[t * lanes + i] = e->d_alike[i * lanes + t];
    product(l->in, lanes, c, l->X, lanes, 1, e->d_alike, lanes, l->dX, lanes, 1);
    for (int i = 0; i < c; i++) {
        const real *d_mix = d->mix_T + i * lanes, *d_erased = e->d_erased_T + i * lanes;
        real step = e->step[i], theta = own->theta[i];
        real d_step = dot(d_mix, given->mix_T + i * lanes, lanes) +
                      dot(d_erased, own->reach_T + i * lanes, lanes) + d->e[i] * given->e[i];
        add_line(lanes, step, d_mix, d_given->mix_T + i * lanes);
        add_line(lanes, step, d_erased, d_own->reach_T + i * lanes);
        d_given->e[i] += step * d->e[i];
        d_own->theta[i] += theta ? d_step * step * step / (theta * theta) : d_step;
        for (int j = 0; j < l->in; j++) l->dX[j * lanes + i] -= 2 * d_step * step * step * l->X[j * lanes + i];
    }
}

/* Turns W and S (one weight set each, layer after layer) into those after the block. */
static void write(Block *b, real *W, real *S) {
    for (int n = 0; n < b->layers; n++) {
        Layer *l = &b->layer[n];
        const Gates *g = &l->gate;
        int64_t size = (int64_t)l->in * l->ld;
        for (int64_t i = 0; i < size; i += LANES) {
            vec w = CONST_AT(W, i), s = CONST_AT(S, i);
            AT(W, i) = g->a * w + g->b * s;
            AT(S, i) = g->m * s;
        }
        scaled(l->in, b->key_lanes, l->X, g->p, b->t1);
        product(l->in, l->ld, b->keys, b->t1, b->key_lanes, 1, l->GR, l->ld, W, l->ld, -1);
        scaled(l->in, b->key_lanes, l->X, g->e, b->t1);
        product(l->in, l->ld, b->keys, b->t1, b->key_lanes, 1, l->GR, l->ld, S, l->ld, -1);
        if (b->erases) {
            load_tokens(1, b->keys, b->key_lanes, l->erased.erased_T + b->c - 1, b->lanes, b->square);
            scaled(l->in, b->key_lanes, l->X, b->square, b->t1);
            product(l->in, l->ld, b->keys, b->t1, b->key_lanes, 1, l->erased.rows, l->ld, W, l->ld, -1);
        }
        W += size, S += size;
    }
}

/* Reads M_t, or with at_start F, with the queries. base: M_0 if W is the difference to it, else NULL. Fills Z,
query_hidden, scores, ZW, ZS and b->out. */
static void read(Block *b, const real *W, const real *S, const real *F, const real *base) {
    int lanes = b->lanes, last = b->layers - 1;
    memcpy(b->layer[0].Z, b->q, (size_t)b->D * lanes * sizeof(real));
    for (int n = 0; n <= last; n++) {
        Layer *l = &b->layer[n];
        const Gates *g = &l->gate;
        real *z = n < last ? l->query_hidden : b->z;
        int64_t size = (int64_t)l->in * l->ld;
        if (b->at_start) {
            product(l->out, lanes, l->in, F, 1, l->ld, l->Z, lanes, z, lanes, 0);
        } else {
            product(l->out, lanes, l->in, W, 1, l->ld, l->Z, lanes, l->ZW, lanes, 0);
            product(l->out, lanes, l->in, S, 1, l->ld, l->Z, lanes, l->ZS, lanes, 0);
            product(b->keys, lanes, l->in, l->X, 1, b->key_lanes, l->Z, lanes, l->scores, lanes, 0);
            for (int i = 0; i < b->keys * lanes; i += LANES)
                AT(b->t1, i) = CONST_AT(l->scores, i) * CONST_AT(g->mix_T, i);
            for (int i = 0; i < l->out; i++)
                for (int t = 0; t < lanes; t += LANES)
                    AT(z, i * lanes + t) = CONST_AT(l->ZW, i * lanes + t) * CONST_AT(g->A, t) +
                                           CONST_AT(l->ZS, i * lanes + t) * CONST_AT(g->B, t);
            product(l->out, lanes, b->keys, l->G, b->key_lanes, 1, b->t1, lanes, z, lanes, -1);
            if (b->erases) {
                for (int i = 0; i < b->keys * lanes; i += LANES)
                    AT(b->t1, i) = CONST_AT(l->scores, i) * CONST_AT(l->erased.erased_T, i);
                product(l->out, lanes, b->keys, l->erased.rows, 1, l->ld, b->t1, lanes, z, lanes, -1);
            }
            if (base) product(l->out, lanes, l->in, base, 1, l->ld, l->Z, lanes, z, lanes, 1), base += size;
        }
        if (n < last) activate(b->activation, l->out * lanes, z, b->layer[n + 1].Z, NULL);
        W += size, S += size, F += size;
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

/* dW, dS: gradients of a layer's last W and S -> of its first W and S, without the queries' part. */
static void state_back(int64_t size, const real *W, const real *S, const Gates *g, real *dW, real *dS, Gates *d) {
    vec of_a = {0}, of_b = {0}, of_m = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vec w = CONST_AT(dW, i), s = CONST_AT(dS, i);
        of_a += w * CONST_AT(W, i);
        of_b += w * CONST_AT(S, i);
        of_m += s * CONST_AT(S, i);
        AT(dW, i) = g->a * w;
        AT(dS, i) = g->b * w + g->m * s;
    }
    d->a += sum(of_a), d->b += sum(of_b), d->m += sum(of_m);
}

/* Backward pass of a layer whose queries read F: sets dZ, adds to dF. */
static void answer_back(Block *b, const Layer *l, const real *F, const real *dz, real *dF, real *dZ) {
    product(l->in, b->lanes, l->out, F, l->ld, 1, dz, b->lanes, dZ, b->lanes, 0);
    by_token(l->out, b->c, b->lanes, dz, b->r);
    product(l->in, l->ld, b->c, l->Z, b->lanes, 1, b->r, l->ld, dF, l->ld, 1);
}

/* Backward pass of one layer's read: dz, the gradient of its outputs -> dZ, the gradient of Z. Sets dG and dX, and adds
to the gradients of the coefficients. */
static void read_back(Block *b, int n, const real *W, const real *S, const real *F, const real *base, const real *dz,
                      real *dF, real *dZ) {
    int lanes = b->lanes, keys = b->key_lanes, c = b->c, K = b->keys;
    Layer *l = &b->layer[n];
    const Gates *g = &l->gate;
    Gates *d = &l->d_gate;
    memset(l->dG, 0, (size_t)l->out * keys * sizeof(real));
    if (b->at_start || b->silent) {
        memset(l->dX, 0, (size_t)l->in * keys * sizeof(real));
        if (b->erases) {
            memset(l->erased.d_rows, 0, (size_t)keys * l->ld * sizeof(real));
            memset(l->erased.d_erased_T, 0, (size_t)keys * lanes * sizeof(real));
        }
        if (!b->silent) answer_back(b, l, F, dz, dF, dZ);
        return;
    }
    inner(l->out, lanes, dz, l->ZW, d->A, 1);
    inner(l->out, lanes, dz, l->ZS, d->B, 1);
    product(K, lanes, l->out, l->G, 1, keys, dz, lanes, b->square, lanes, 0);
    for (int i = 0; i < K * lanes; i += LANES) {
        vec of_mixed = -CONST_AT(b->square, i), s = CONST_AT(l->scores, i), mix = CONST_AT(g->mix_T, i);
        AT(b->d_scores_T, i) = of_mixed * mix;
        AT(b->mixed_T, i) = s * mix;
        AT(d->mix_T, i) += of_mixed * s;
    }
    if (b->erases) {
        Erased *e = &l->erased;
        product(K, lanes, l->out, e->rows, l->ld, 1, dz, lanes, b->square, lanes, 0);
        for (int i = 0; i < K * lanes; i += LANES) {
            vec of_mixed = -CONST_AT(b->square, i), s = CONST_AT(l->scores, i), erased = CONST_AT(e->erased_T, i);
            AT(b->d_scores_T, i) += of_mixed * erased;
            AT(e->d_erased_T, i) = of_mixed * s;
            AT(b->t1, i) = s * erased;
        }
        by_token(l->out, c, lanes, dz, b->r);
        memset(e->d_rows, 0, (size_t)keys * l->ld * sizeof(real));
        product(K, l->ld, c, b->t1, lanes, 1, b->r, l->ld, e->d_rows, l->ld, -1);
    }
    size_t rest = (size_t)(keys - K) * lanes * sizeof(real);
    memset(b->d_scores_T + K * lanes, 0, rest);
    memset(b->mixed_T + K * lanes, 0, rest);
    transpose(b->d_scores_T, lanes, keys, lanes, b->d_scores, keys);
    transpose(b->mixed_T, lanes, keys, lanes, b->mixed, keys);
    product(l->out, keys, c, dz, lanes, 1, b->mixed, keys, l->dG, keys, -1);
    product(l->in, keys, c, l->Z, lanes, 1, b->d_scores, keys, l->dX, keys, 0);
    scaled(l->out, lanes, dz, g->A, b->t1);
    product(l->in, lanes, l->out, W, l->ld, 1, b->t1, lanes, dZ, lanes, 0);
    scaled(l->out, lanes, dz, g->B, b->t1);
    product(l->in, lanes, l->out, S, l->ld, 1, b->t1, lanes, dZ, lanes, 1);
    product(l->in, lanes, K, l->X, keys, 1, b->d_scores_T, lanes, dZ, lanes, 1);
    if (base) product(l->in, lanes, l->out, base, l->ld, 1, dz, lanes, dZ, lanes, 1);
}

/* From b->d_out to dz, the gradient of the last matrix's outputs. Sets d_q. */
static void finish_back(Block *b, real *dz) {
    int lanes = b->lanes;
    for (int i = 0; i < b->D; i++) {
        vec of_gamma = {0}, of_beta = {0};
        for (int t = i * lanes; t < (i + 1) * lanes; t += LANES) {
            vec d = CONST_AT(b->d_out, t);
            AT(b->d_q, t) = d * (real)b->residual;
            if (b->norm) of_gamma += d * CONST_AT(b->query.unit, t), of_beta += d, d *= b->gamma[i];
            AT(dz, t) = d;
        }
        if (b->norm) b->d_gamma[i] += sum(of_gamma), b->d_beta[i] += sum(of_beta);
    }
    if (b->norm) normalise_back(b->D, lanes, dz, b->query, dz);
}

/* From dZ of layer n to dz of the layer below; for the lowest layer, adds dZ to d_q. */
static void below_back(Block *b, int n, const real *dZ, real *dz) {
    int lanes = b->lanes;
    if (n)
        pull_back(b->activation, b->layer[n].in * lanes, b->layer[n - 1].query_hidden, dZ, dz);
    else
        for (int i = 0; i < b->D * lanes; i += LANES) AT(b->d_q, i) += CONST_AT(dZ, i);
}

/* Backward pass of a block, after key_side and read. b->d_out is given; W, S, F, base: as in key_side and read. dW, dS:
on entry gradients of the weights after the block, on return of those before it. Adds to dF and d_base. Sets d_q, d_k,
d_v, d_gate, d_threshold. */
static void backward(Block *b, const real *W, const real *S, const real *F, const real *base, real *dW, real *dS,
                     real *dF, real *d_base) {
    int lanes = b->lanes, keys = b->key_lanes, c = b->c, K = b->keys, D = b->D, last = b->layers - 1;
    int64_t at[MAX_LAYERS];
    at[0] = 0;
    for (int n = 0; n < last; n++) at[n + 1] = at[n] + (int64_t)b->layer[n].in * b->layer[n].ld;
    for (int n = 0; n < b->gate_layers; n++) {
        Gates *d = &b->d_gate[n];
        memset(d->A, 0, lanes * sizeof(real));
        memset(d->B, 0, lanes * sizeof(real));
        memset(d->p, 0, keys * sizeof(real));
        memset(d->e, 0, keys * sizeof(real));
        if (b->pairs) memset(d->mix_T, 0, (size_t)keys * lanes * sizeof(real));
        d->a = d->b = d->m = 0;
        if (!b->erases) continue;
        Erasing *own = &b->d_erasing[n];
        memset(own->theta, 0, lanes * sizeof(real));
        memset(own->keep, 0, lanes * sizeof(real));
        memset(own->reach_T, 0, (size_t)keys * lanes * sizeof(real));
    }

    real *dz = b->z, *dZ = b->t3;
    if (!b->silent) finish_back(b, dz);
    for (int n = last; n >= 0; n--) {
        Layer *l = &b->layer[n];
        const Gates *g = &l->gate;
        Gates *d = &l->d_gate;
        int64_t size = (int64_t)l->in * l->ld;
        real *dw = dW + at[n], *ds = dS + at[n];
        Gates *d_given = &b->d_gate[gate_layer(b, n)];
        d->a = d->b = d->m = 0;
        if (b->erases) {
            memset(d->mix_T, 0, (size_t)keys * lanes * sizeof(real));
            memset(d->p, 0, keys * sizeof(real));
            memset(d->e, 0, keys * sizeof(real));
        }
        read_back(b, n, W + at[n], S + at[n], F + at[n], base ? base + at[n] : NULL, dz, dF + at[n], dZ);

        /* The keys' gradients through the new weights. */
        product(l->out, keys, l->in, dw, 1, l->ld, l->X, keys, b->t1, keys, 0);
        product(l->out, keys, l->in, ds, 1, l->ld, l->X, keys, b->t2, keys, 0);
        inner(l->out, keys, l->G, b->t1, d->p, -1);
        inner(l->out, keys, l->G, b->t2, d->e, -1);
        for (int i = 0; i < l->out; i++)
            for (int t = 0; t < keys; t += LANES)
                AT(l->dG, i * keys + t) -= CONST_AT(b->t1, i * keys + t) * CONST_AT(g->p, t) +
                                           CONST_AT(b->t2, i * keys + t) * CONST_AT(g->e, t);
        scaled(l->out, keys, l->G, g->p, b->t1);
        product(l->in, keys, l->out, dw, l->ld, 1, b->t1, keys, l->dX, keys, -1);
        scaled(l->out, keys, l->G, g->e, b->t1);
        product(l->in, keys, l->out, ds, l->ld, 1, b->t1, keys, l->dX, keys, -1);
        if (b->erases) write_back(b, n, dw);

        state_back(size, W + at[n], S + at[n], g, dw, ds, d);
        d_given->a += d->a, d_given->b += d->b, d_given->m += d->m;
        if (!b->at_start && !b->silent) {
            by_token(l->out, c, lanes, dz, b->r);
            if (base) product(l->in, l->ld, c, l->Z, lanes, 1, b->r, l->ld, d_base + at[n], l->ld, 1);
            scaled(l->in, lanes, l->Z, g->A, b->t1);
            product(l->in, l->ld, c, b->t1, lanes, 1, b->r, l->ld, dw, l->ld, 1);
            scaled(l->in, lanes, l->Z, g->B, b->t1);
            product(l->in, l->ld, c, b->t1, lanes, 1, b->r, l->ld, ds, l->ld, 1);
        }
        if (b->erases) erase_back(b, n, W + at[n], S + at[n], dw, ds);
        if (!b->silent) below_back(b, n, dZ, dz);
    }

    /* Derivative of the inner gradient. */
    for (int n = 0; n < last; n++) {
        Layer *l = &b->layer[n], *above = l + 1;
        int count = l->out * keys;
        for (int i = 0; i < count; i += LANES) AT(b->t1, i) = CONST_AT(l->dG, i) * CONST_AT(l->slope, i);
        curve(b->activation, count, l->hidden, l->dG, l->pulled, l->d_hidden);
        product(above->out, keys, above->in, F + at[n + 1], 1, above->ld, b->t1, keys, above->dG, keys, 1);
        product(above->in, above->ld, K, b->t1, keys, 1, above->GR, above->ld, dF + at[n + 1], above->ld, 1);
    }
    Layer *l = &b->layer[last];
    real *df = b->t2, *spare = b->t3;
    if (b->norm) {
        normalise_back(D, keys, l->dG, b->key, b->t1);
        scaled_rows(D, keys, b->t1, b->gamma, df);
        loss_back(b, b->error, df, df);
        for (int t = 0; t < keys; t += LANES) {
            vec flat = {0}, tilt = {0}, along = {0}, scale = CONST_AT(b->key.scale, t);
            for (int i = 0; i < D; i++) {
                vec unit = CONST_AT(b->key.unit, i * keys + t), d = CONST_AT(l->dG, i * keys + t);
                flat += CONST_AT(b->top, i * keys + t) * b->gamma[i] * unit;
                tilt += d * unit;
                along += d * CONST_AT(l->G, i * keys + t);
            }
            scale /= (real)D;
            flat *= scale, tilt *= scale;
            AT(b->square, t) = along * scale;
            for (int i = 0; i < D; i++) {
                real gamma = b->gamma[i];
                vec d_y = CONST_AT(df, i * keys + t);
                AT(b->d_v, i * keys + t) = -d_y;
                AT(df, i * keys + t) = d_y * gamma - CONST_AT(l->dG, i * keys + t) * flat -
                                       CONST_AT(b->top, i * keys + t) * gamma * tilt;
            }
        }
        for (int i = 0; i < D; i++) {
            vec of_gamma = {0}, of_beta = {0};
            for (int t = i * keys; t < (i + 1) * keys; t += LANES) {
                vec d_y = -CONST_AT(b->d_v, t);
                of_gamma += CONST_AT(b->t1, t) * CONST_AT(b->top, t) + d_y * CONST_AT(b->key.unit, t);
                of_beta += d_y;
            }
            b->d_gamma[i] += sum(of_gamma), b->d_beta[i] += sum(of_beta);
        }
        normalise_back(D, keys, df, b->key, df);
        for (int i = 0; i < D; i++)
            for (int t = 0; t < keys; t += LANES)
                AT(df, i * keys + t) -= CONST_AT(b->key.unit, i * keys + t) * CONST_AT(b->square, t);
    } else {
        loss_back(b, b->error, l->dG, df);
        for (int i = 0; i < D * keys; i += LANES) AT(b->d_v, i) = -CONST_AT(df, i);
    }
    for (int n = last; n >= 0; n--) {
        l = &b->layer[n];
        by_token(l->out, K, keys, df, b->r);
        product(l->in, l->ld, K, l->X, keys, 1, b->r, l->ld, dF + at[n], l->ld, 1);
        product(l->in, keys, l->out, F + at[n], l->ld, 1, df, keys, l->dX, keys, 1);
        if (n) {
            Layer *below = l - 1;
            for (int i = 0; i < l->in * keys; i += LANES)
                AT(spare, i) = CONST_AT(below->d_hidden, i) + CONST_AT(l->dX, i) * CONST_AT(below->slope, i);
            real *swap = df;
            df = spare, spare = swap;
        }
    }
    for (int i = 0; i < D * keys; i += LANES)
        AT(b->d_k, i) = CONST_AT(l->dX, i) - CONST_AT(b->d_v, i) * (real)b->residual;
}

/* ---- all blocks of some rows */

/* Inputs of every call: pointers to contiguous tensors; for weights one per layer, (rows, d_in, d_out). W is the
memory's weights, never a difference to M_0; begin: M_0. Coefficients: see coefficients.py, (gate layers, blocks, rows,
...); with at_start and without erasing, A, B and mix have one line, for the chunk's end. */
typedef struct {
    const real *q, *k, *v; /* laid out as Call says, like their outputs and gradients */
    const real *A, *B, *mix, *m, *e;
    const real *threshold;                   /* (blocks, rows, keys), or NULL */
    const real *theta, *keep, *reach;        /* if the rule erases, (gate layers, blocks, rows, tokens), reach twice */
    const real *gamma, *beta;                /* (rows, width) */
    const uint8_t *new_chunk, *new_document; /* (blocks, rows) */
    real *begin[MAX_LAYERS], *W[MAX_LAYERS], *S[MAX_LAYERS], *F[MAX_LAYERS];
    real *kept; /* (groups, rows, 3, one padded weight set); NULL for one group, which starts at W, S and F */
} Inputs;

typedef struct {
    real *out;
    real *W[MAX_LAYERS], *S[MAX_LAYERS], *F[MAX_LAYERS];
} Outputs;

/* W, S, F: of the state after the last token on entry, before the first one on return. begin: (rows, ...), added to. */
typedef struct {
    const real *out;
    real *q, *k, *v, *A, *B, *mix, *m, *e, *threshold, *theta, *keep, *reach, *gamma, *beta;
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

static int64_t place(Places p, int64_t n, int64_t row) {
    return row / p.heads * p.batch + row % p.heads * p.head + n * p.block;
}

/* Loads a block's tokens and coefficients. */
static void fetch(Block *b, const Call *call, const Inputs *x, int64_t n, int64_t row) {
    int c = b->c, lanes = b->lanes, K = b->keys, keys = b->key_lanes, lines = b->pairs ? c : 1;
    int64_t at = place(call->key, n, row);
    if (!b->silent) load_tokens(b->D, c, lanes, x->q + place(call->query, n, row), call->query.token, b->q);
    load_tokens(b->D, K, keys, x->k + at, call->key.token, b->k);
    load_tokens(b->D, K, keys, x->v + at, call->key.token, b->v);
    for (int i = 0; i < b->gate_layers; i++) {
        Gates *g = &b->gate[i];
        int64_t here = (i * call->blocks + n) * call->rows + row;
        const real *A = x->A + here * lines, *B = x->B + here * lines, *mix = x->mix + here * lines * K;
        load_tokens(1, K, keys, mix + (lines - 1) * K, 1, g->p);
        load_tokens(1, K, keys, x->e + here * K, 1, g->e);
        g->a = A[lines - 1], g->b = B[lines - 1], g->m = x->m[here];
        if (!b->pairs) continue;
        load_tokens(1, c, lanes, A, 1, g->A);
        load_tokens(1, c, lanes, B, 1, g->B);
        load_tokens(K, c, lanes, mix, K, g->mix_T);
        if (!b->erases) continue;
        load_tokens(1, c, lanes, x->theta + here * c, 1, b->erasing[i].theta);
        load_tokens(1, c, lanes, x->keep + here * c, 1, b->erasing[i].keep);
        load_tokens(K, c, lanes, x->reach + here * c * K, K, b->erasing[i].reach_T);
    }
    for (int t = 0; t < keys; t++)
        b->threshold[t] = x->threshold && t < K ? x->threshold[(n * call->rows + row) * K + t] : 1;
    b->gamma = x->gamma + row * call->width, b->beta = x->beta + row * call->width;
}

/* Stores the gradients of what fetch loaded. */
static void hand_back(const Block *b, const Call *call, const Gradients *d, int64_t n, int64_t row) {
    int c = b->c, lanes = b->lanes, K = b->keys, keys = b->key_lanes, lines = b->pairs ? c : 1;
    int64_t at = place(call->key, n, row);
    if (!b->silent) store_tokens(b->D, c, lanes, b->d_q, call->query.token, d->q + place(call->query, n, row));
    store_tokens(b->D, K, keys, b->d_k, call->key.token, d->k + at);
    store_tokens(b->D, K, keys, b->d_v, call->key.token, d->v + at);
    for (int i = 0; i < b->gate_layers; i++) {
        const Gates *g = &b->d_gate[i];
        int64_t here = (i * call->blocks + n) * call->rows + row;
        real *A = d->A + here * lines, *B = d->B + here * lines, *mix = d->mix + here * lines * K;
        if (!b->pairs) {
            A[0] = B[0] = 0;
            memset(mix, 0, K * sizeof(real));
        } else {
            store_tokens(1, c, lanes, g->A, 1, A);
            store_tokens(1, c, lanes, g->B, 1, B);
            store_tokens(K, c, lanes, g->mix_T, K, mix);
        }
        A[lines - 1] += g->a, B[lines - 1] += g->b, d->m[here] = g->m;
        for (int t = 0; t < K; t++) mix[(lines - 1) * K + t] += g->p[t];
        store_tokens(1, K, keys, g->e, 1, d->e + here * K);
        if (!b->erases) continue;
        store_tokens(1, c, lanes, b->d_erasing[i].theta, 1, d->theta + here * c);
        store_tokens(1, c, lanes, b->d_erasing[i].keep, 1, d->keep + here * c);
        store_tokens(K, c, lanes, b->d_erasing[i].reach_T, K, d->reach + here * c * K);
    }
    if (d->threshold) memcpy(d->threshold + (n * call->rows + row) * K, b->d_threshold, K * sizeof(real));
}

/* From the state before a block to the state at its start: a document or a chunk may begin. base: M_0. */
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

/* Size of one weight set in Inputs.kept, in numbers. */
int64_t set_size(const Call *call) {
    Block b;
    return set_layer(call, &b);
}

/* Allocates a block's matrices, all zero, and behind them, at arena->next, room for ``sets`` weight sets. Returns 1 if
no memory is left. */
static int reserve(const Call *call, Block *b, Arena *arena, int64_t sets) {
    *arena = (Arena){0};
    int64_t state = set_layer(call, b);
    lay_out(b, arena);
    size_t bytes = (size_t)((arena->next - (real *)0) + sets * state) * sizeof(real);
    if (posix_memalign((void **)&arena->begin, 64, bytes)) return 1;
    memset(arena->begin, 0, bytes);
    arena->next = arena->begin;
    lay_out(b, arena);
    return 0;
}

int forward(const Call *call, const Inputs *x, const Outputs *y, int64_t first, int64_t last) {
    Block b;
    Arena arena;
    if (reserve(call, &b, &arena, 4)) return 1;
    int64_t state = b.state;
    real *W = arena.next, *S = W + state, *F = S + state, *base = F + state;
    for (int64_t row = first; row < last; row++) {
        pack(&b, x->W, row, W);
        pack(&b, x->S, row, S);
        pack(&b, x->F, row, F);
        if (x->begin[0]) pack(&b, x->begin, row, base);
        if (b.to_start) subtract(state, W, base);
        for (int64_t n = 0; n < call->blocks; n++) {
            if (x->kept && n % call->every == 0) {
                real *to = x->kept + (n / call->every * call->rows + row) * 3 * state;
                memcpy(to, W, (size_t)(3 * state) * sizeof(real)); /* S and F lie behind W */
            }
            start(&b, call, x, n, row, base, W, S, F);
            fetch(&b, call, x, n, row);
            key_side(&b, F);
            erase(&b, W, S);
            if (!b.silent) {
                read(&b, W, S, F, b.to_start ? base : NULL);
                store_tokens(b.D, b.c, b.lanes, b.out, call->query.token, y->out + place(call->query, n, row));
            }
            write(&b, W, S);
        }
        if (b.to_start) add(state, W, base);
        unpack(&b, W, row, y->W);
        unpack(&b, S, row, y->S);
        if (y->F[0]) unpack(&b, F, row, y->F); /* callers that know where chunks begin need no F */
    }
    free(arena.begin);
    return 0;
}

int reverse(const Call *call, const Inputs *x, const Gradients *d, int64_t first, int64_t last) {
    Block b;
    Arena arena;
    if (reserve(call, &b, &arena, 5 + 3 * (call->every + 1))) return 1;
    int64_t state = b.state;
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
            if (x->kept) {
                memcpy(played, x->kept + (group * call->rows + row) * 3 * state, 3 * bytes);
            } else {
                pack(&b, x->W, row, played);
                pack(&b, x->S, row, played + state);
                pack(&b, x->F, row, played + 2 * state);
                if (b.to_start) subtract(state, played, base);
            }
            for (int64_t n = begin; n < end; n++) {
                real *W = played + (n - begin) * 3 * state, *S = W + state, *F = S + state;
                start(&b, call, x, n, row, base, W, S, F);
                if (n + 1 == end) break;
                memcpy(W + 3 * state, W, 3 * bytes);
                fetch(&b, call, x, n, row);
                key_side(&b, F);
                erase(&b, W, S);
                write(&b, W + 3 * state, S + 3 * state);
            }
            for (int64_t n = end - 1; n >= begin; n--) {
                real *W = played + (n - begin) * 3 * state, *S = W + state, *F = S + state;
                const real *from = b.to_start ? base : NULL;
                fetch(&b, call, x, n, row);
                if (!b.silent)
                    load_tokens(b.D, b.c, b.lanes, d->out + place(call->query, n, row), call->query.token, b.d_out);
                key_side(&b, F);
                erase(&b, W, S);
                if (!b.silent) read(&b, W, S, F, from);
                backward(&b, W, S, F, from, dW, dS, dF, d_base);
                hand_back(&b, call, d, n, row);
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

/* ---- answers only: M(q) of one block at F, nothing written */

int answer(const Call *call, const Inputs *x, const Outputs *y, int64_t first, int64_t last) {
    Block b;
    Arena arena;
    if (reserve(call, &b, &arena, 1)) return 1;
    real *F = arena.next;
    for (int64_t row = first; row < last; row++) {
        int64_t at = place(call->query, 0, row);
        pack(&b, x->F, row, F);
        load_tokens(b.D, b.c, b.lanes, x->q + at, call->query.token, b.q);
        b.gamma = x->gamma + row * call->width, b.beta = x->beta + row * call->width;
        read(&b, F, F, F, NULL);
        store_tokens(b.D, b.c, b.lanes, b.out, call->query.token, y->out + at);
    }
    free(arena.begin);
    return 0;
}

int answer_reverse(const Call *call, const Inputs *x, const Gradients *d, int64_t first, int64_t last) {
    Block b;
    Arena arena;
    if (reserve(call, &b, &arena, 2)) return 1;
    int64_t state = b.state;
    real *F = arena.next, *dF = F + state;
    for (int64_t row = first; row < last; row++) {
        int64_t at = place(call->query, 0, row), end = state;
        pack(&b, x->F, row, F);
        memset(dF, 0, (size_t)state * sizeof(real));
        load_tokens(b.D, b.c, b.lanes, x->q + at, call->query.token, b.q);
        load_tokens(b.D, b.c, b.lanes, d->out + at, call->query.token, b.d_out);
        b.gamma = x->gamma + row * call->width, b.beta = x->beta + row * call->width;
        b.d_gamma = d->gamma + row * call->width, b.d_beta = d->beta + row * call->width;
        read(&b, F, F, F, NULL);
        finish_back(&b, b.z);
        for (int n = b.layers - 1; n >= 0; n--) {
            end -= (int64_t)b.layer[n].in * b.layer[n].ld;
            answer_back(&b, &b.layer[n], F + end, b.z, dF + end, b.t3);
            below_back(&b, n, b.t3, b.z);
        }
        store_tokens(b.D, b.c, b.lanes, b.d_q, call->query.token, d->q + at);
        unpack(&b, dF, row, d->F);
    }
    free(arena.begin);
    return 0;
}
