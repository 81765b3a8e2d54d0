/* Vectors of REAL = float or double, as wide as the machine's. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

typedef REAL real;
typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
#define LANES ((int)(BYTES / sizeof(real)))
#define SMALLEST ((real)1e-6) /* lower bound of the length that a head is divided by */
#define INLINE static inline __attribute__((always_inline))
#define AT(p, i) (*(vec *)((p) + (i)))
#define CONST_AT(p, i) (*(const vec *)((p) + (i)))

#ifdef REAL_IS_DOUBLE
typedef int64_t ints __attribute__((vector_size(BYTES)));
#else
typedef int32_t ints __attribute__((vector_size(BYTES)));
#endif

/* ``count`` <= LANES numbers, zeros after them. */
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

/* How many numbers from ``at`` to ``end`` go into one vector. */
INLINE int width_at(int64_t at, int64_t end) { return end - at < LANES ? end - at : LANES; }

INLINE vec choose(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }

#ifdef REAL_IS_DOUBLE
static vec exponential(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
    return x;
}
#else
/* exp(x) within 2 units in the last place; x is clamped to [-87, 87]. */
INLINE vec exponential(vec x) {
    x = choose(x < -87.0f, x * 0 - 87.0f, x);
    x = choose(x > 87.0f, x * 0 + 87.0f, x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return p * (vec)power;
}
#endif

/* The sigmoid. */
INLINE vec share(vec z) { return 1 / (1 + exponential(-z)); }

INLINE real sum(vec x) {
    real total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE real dot(const real *a, const real *b, int64_t n) {
    vec sums = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sums += CONST_AT(a, i) * CONST_AT(b, i);
    real total = sum(sums);
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}
