/* Attention of one token per row over several sets of keys, each set with its own query, under one softmax. Called
through ctypes (token.py). */

#include "../vector.h"

#define MAX_PARTS 4

/* q (rows, heads, width), k, v (rows, keys, heads / group, width); q_row .. v_key: strides of rows and keys in numbers. */
typedef struct {
    const real *q, *k, *v;
    int64_t keys, q_row, k_row, k_key, v_row, v_key;
} Part;

typedef struct {
    int64_t heads, width, parts;
    int64_t group; /* neighbouring query heads that share one key and value head */
    double scale;
    Part part[MAX_PARTS];
} Call;

/* -> out (rows, heads, width). Heads first .. last - 1 of all rows. */
int attend(const Call *call, real *out, int64_t first, int64_t last) {
    int64_t D = call->width, all = 0;
    for (int p = 0; p < call->parts; p++) all += call->part[p].keys;
    real *share = malloc((all + LANES) * sizeof(real));
    if (!share) return 1;
    for (int64_t at = first; at < last; at++) {
        int64_t row = at / call->heads, head = at % call->heads, n = 0;
        int64_t place = head * D, shared = head / call->group * D;
        real *y = out + at * D, most = -INFINITY, total = 0;
        for (int p = 0; p < call->parts; p++) {
            const Part *part = call->part + p;
            const real *q = part->q + row * part->q_row + place, *k = part->k + row * part->k_row + shared;
            for (int64_t i = 0; i < part->keys; i++, n++) {
                share[n] = dot(q, k + i * part->k_key, D) * (real)call->scale;
                most = share[n] > most ? share[n] : most;
            }
        }
        for (int64_t i = 0; i < n; i += LANES) {
            vec e = exponential(CONST_AT(share, i) - most);
            AT(share, i) = e;
        }
        for (int64_t i = 0; i < n; i++) total += share[i];
        for (int64_t i = 0; i < D; i++) y[i] = 0;
        n = 0;
        for (int p = 0; p < call->parts; p++) {
            const Part *part = call->part + p;
            const real *v = part->v + row * part->v_row + shared;
            for (int64_t i = 0; i < part->keys; i++, n++) {
                real weight = share[n] / total;
                for (int64_t d = 0; d < D; d++) y[d] += weight * v[i * part->v_key + d];
            }
        }
    }
    free(share);
    return 0;
}
