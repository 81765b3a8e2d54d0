/* Vectors of REAL = float or double, as wide as the machine's. */

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
#define INLINE static inline __attribute__((always_inline))
#define AT(p, i) (*(vec *)((p) + (i)))
#define CONST_AT(p, i) (*(const vec *)((p) + (i)))
