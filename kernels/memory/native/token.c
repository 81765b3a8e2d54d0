/* One token of a stream, for generation: the definition (naive.py) with the gradient written out, one row at a time. A
row is one head of one batch row. Every weight set is written once per token; the dual form of scan.c is
meant for the tokens of a block together. Called through ctypes (token.py). */

#include "network.h"

/* token.py has the same fields. */
typedef struct {
    int64_t heads, layers, width, hidden, gate_layers;
    int64_t activation, norm, residual, to_start;
} Call;

/* Contiguous. q, k, v (batch, heads, width); gates (batch, heads, gate_layers); fresh (batch): whether the token is its
chunk's first, so that its gradient is taken at W. All batch rows share gamma, beta (heads, width) and begin, M_0
(heads, d_in, d_out). W, S and F (batch, heads, d_in, d_out): F are the weights at the chunk's start. */
typedef struct {
    const real *q, *k, *v, *theta, *eta, *alpha, *gamma, *beta;
    const uint8_t *fresh;
    const real *begin[MAX_LAYERS], *W[MAX_LAYERS], *S[MAX_LAYERS], *F[MAX_LAYERS];
} Inputs;

typedef struct {
    real *out;
    real *W[MAX_LAYERS], *S[MAX_LAYERS];
} Outputs;

/* out (columns) = x (rows) A, A (rows, columns). */
static void times(const real *restrict x, const real *restrict A, int rows, int columns, real *restrict out) {
    for (int j = 0; j < columns; j++) out[j] = 0;
    int i = 0;
    for (; i + 4 <= rows; i += 4, A += 4 * columns)
        for (int j = 0; j < columns; j++)
            out[j] += x[i] * A[j] + x[i + 1] * A[columns + j] + x[i + 2] * A[2 * columns + j] +
                      x[i + 3] * A[3 * columns + j];
    for (; i < rows; i++, A += columns)
        for (int j = 0; j < columns; j++) out[j] += x[i] * A[j];
}

/* f (D) -> (f - mean) / deviation; returns 1 / deviation. */
static real normalise(const real *f, int D, real *unit) {
    real mean = 0, square = 0;
    for (int i = 0; i < D; i++) mean += f[i];
    mean /= D;
    for (int i = 0; i < D; i++) unit[i] = f[i] - mean, square += unit[i] * unit[i];
    real scale = 1 / sqrt(square / D + EPSILON);
    for (int i = 0; i < D; i++) unit[i] *= scale;
    return scale;
}

/* d (D), the gradient of normalise's output -> the gradient of f, in place. */
static void normalise_back(real *d, const real *unit, real scale, int D) {
    real mean = 0, along = 0;
    for (int i = 0; i < D; i++) mean += d[i], along += d[i] * unit[i];
    mean /= D, along /= D;
    for (int i = 0; i < D; i++) d[i] = (d[i] - mean - unit[i] * along) * scale;
}

/* One layer's weights after the token, and out (columns) = x (rows) times them. The inner gradient is key (rows) times
error (columns). begin NULL: forgotten to zero. */
static void write(const real *restrict key, const real *restrict error, const real *restrict x, real theta, real eta,
                  real keep, const real *restrict begin, const real *restrict W, const real *restrict S, int rows,
                  int columns, real *restrict new_W, real *restrict new_S, real *restrict out) {
    for (int j = 0; j < columns; j++) out[j] = 0;
    for (int i = 0; i < rows; i++) {
        int64_t at = (int64_t)i * columns;
        real step = theta * key[i], read = x[i];
        for (int j = 0; j < columns; j++) {
            real s = eta * S[at + j] - step * error[j];
            real w = begin ? begin[at + j] + keep * (W[at + j] - begin[at + j]) + s : keep * W[at + j] + s;
            new_S[at + j] = s, new_W[at + j] = w;
            out[j] += read * w;
        }
    }
}

/* Steps after the last matrix: y (D) from its output z and M's input x; overwrites ``unit``. Returns normalise's
result. */
static real finish(const Call *call, const real *z, const real *x, const real *gamma, const real *beta, real *unit,
                   real *y) {
    int D = call->width;
    real scale = call->norm ? normalise(z, D, unit) : 0;
    for (int i = 0; i < D; i++)
        y[i] = (call->norm ? gamma[i] * unit[i] + beta[i] : z[i]) + (call->residual ? x[i] : 0);
    return scale;
}

/* Length of each vector in a row's working space: whole machine vectors. */
static int64_t stride(const Call *call) {
    int64_t wide = call->hidden > call->width ? call->hidden : call->width;
    return (wide + LANES - 1) / LANES * LANES;
}

/* M(q) at W; nothing is written. Rows first .. last - 1. */
int recall(const Call *call, const Inputs *in, const Outputs *out, int64_t first, int64_t last) {
    int D = call->width, top = call->layers - 1;
    int64_t step = stride(call);
    real *work = calloc(3 * step, sizeof(real)), *query = work, *z = work + step, *unit = z + step;
    if (!work) return 1;
    for (int64_t row = first; row < last; row++) {
        int64_t head = row % call->heads;
        memcpy(query, in->q + row * D, D * sizeof(real));
        for (int n = 0; n <= top; n++) {
            int rows = n ? call->hidden : D, columns = n < top ? call->hidden : D;
            times(query, in->W[n] + row * rows * columns, rows, columns, z);
            if (n < top) activate(call->activation, columns, z, query, NULL);
        }
        finish(call, z, in->q + row * D, in->gamma + head * D, in->beta + head * D, unit, out->out + row * D);
    }
    free(work);
    return 0;
}

/* Rows first .. last - 1. */
int token(const Call *call, const Inputs *in, const Outputs *out, int64_t first, int64_t last) {
    int D = call->width, top = call->layers - 1;
    int64_t step = stride(call);
    real *work = calloc((3 * MAX_LAYERS + 3) * step, sizeof(real));
    if (!work) return 1;
    real *key[MAX_LAYERS], *slope[MAX_LAYERS], *error[MAX_LAYERS];
    for (int n = 0; n < MAX_LAYERS; n++)
        key[n] = work + 3 * n * step, slope[n] = key[n] + step, error[n] = slope[n] + step;
    real *z = work + 3 * MAX_LAYERS * step, *unit = z + step, *query = unit + step;
    for (int64_t row = first; row < last; row++) {
        int64_t head = row % call->heads;
        const real *gamma = in->gamma + head * D, *beta = in->beta + head * D;
        const real *k = in->k + row * D, *q = in->q + row * D, *v = in->v + row * D;
        const real *const *frozen = in->fresh[row / call->heads] ? in->W : in->F;

        memcpy(key[0], k, D * sizeof(real));
        for (int n = 0; n <= top; n++) {
            int rows = n ? call->hidden : D, columns = n < top ? call->hidden : D;
            times(key[n], frozen[n] + row * rows * columns, rows, columns, z);
            if (n < top) activate(call->activation, columns, z, key[n + 1], slope[n]);
        }
        real *e = error[top], scale = finish(call, z, k, gamma, beta, unit, e);
        for (int i = 0; i < D; i++) e[i] = 2 * (e[i] - v[i]) * (call->norm ? gamma[i] : 1);
        if (call->norm) normalise_back(e, unit, scale, D);
        for (int n = top; n > 0; n--) {
            int columns = n < top ? call->hidden : D;
            int64_t size = (int64_t)call->hidden * columns;
            for (int i = 0; i < call->hidden; i++)
                error[n - 1][i] = dot(frozen[n] + row * size + i * columns, error[n], columns) * slope[n - 1][i];
        }

        memcpy(query, q, D * sizeof(real));
        for (int n = 0; n <= top; n++) {
            int rows = n ? call->hidden : D, columns = n < top ? call->hidden : D;
            int64_t gate = row * call->gate_layers + (call->gate_layers > 1 ? n : 0);
            int64_t size = (int64_t)rows * columns, at = row * size;
            const real *begin = call->to_start ? in->begin[n] + head * size : NULL;
            write(key[n], error[n], query, in->theta[gate], in->eta[gate], 1 - in->alpha[gate], begin, in->W[n] + at,
                  in->S[n] + at, rows, columns, out->W[n] + at, out->S[n] + at, z);
            if (n < top) activate(call->activation, columns, z, query, NULL);
        }
        finish(call, z, q, gamma, beta, unit, out->out + row * D);
    }
    free(work);
    return 0;
}
