/* Constants and activations of the memory's network, shared by scan.c and token.c. */

#include "../../vector.h"

#define MAX_LAYERS 8

enum { GELU, SILU, RELU };

static const real EPSILON = 1e-5; /* of the LayerNorm */

/* The normal distribution at z: the probability below z, and the density. */
INLINE void normal(vec z, vec *below, vec *density) {
    *density = exponential(z * z * (real)-0.5) * (real)0.39894228040143268;
#ifdef REAL_IS_DOUBLE
    for (int i = 0; i < LANES; i++) (*below)[i] = 0.5 * erfc(-z[i] * 0.70710678118654752);
#else
    /* Abramowitz and Stegun, 7.1.26: absolute error of erf 1.5e-7. */
    vec t = 1 / (1 + 0.3275911f * 0.70710678f * choose(z < 0, -z, z));
    vec p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    vec tail = p * *density * 1.2533141373f; /* 0.5 p exp(-z^2 / 2) */
    *below = choose(z < 0, tail, 1 - tail);
#endif
}

/* act(z), and the slope at z unless slope is NULL. */
static void activate(int kind, int count, const real *z, real *out, real *slope) {
    for (int i = 0; i < count; i += LANES) {
        vec x = CONST_AT(z, i), s;
        if (kind == GELU) {
            vec below, density;
            normal(x, &below, &density);
            AT(out, i) = x * below;
            s = below + x * density;
        } else if (kind == SILU) {
            vec y = share(x);
            AT(out, i) = x * y;
            s = y * (1 + x * (1 - y));
        } else {
            s = choose(x > 0, x * 0 + 1, x * 0);
            AT(out, i) = x * s;
        }
        if (slope) AT(slope, i) = s;
    }
}
