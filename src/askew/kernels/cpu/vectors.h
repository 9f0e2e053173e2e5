/* Numbers and vectors of them, as wide as the machine's. DOUBLE says whether numbers have 64 bits. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if DOUBLE
typedef double real;
typedef int64_t whole;
#define SIZE 8
#else
typedef float real;
typedef int32_t whole;
#define SIZE 4
#endif

#if defined(__AVX512F__)
#define BYTES 64 /* of a vector */
#define MANY 1   /* registers: 32 instead of 16 */
#elif defined(__AVX__) && defined(__FMA__)
#define BYTES 32
#define MANY 0
#elif defined(__aarch64__)
#define BYTES 16
#define MANY 1
#else
#error "without fused multiplication and addition sums lose digits, and torch is as fast"
#endif

#define LANES (BYTES / SIZE)
typedef real vec __attribute__((vector_size(BYTES), aligned(SIZE), may_alias));
typedef whole mask __attribute__((vector_size(BYTES)));

#define INLINE static inline __attribute__((always_inline))
#define UP(a, b) (((a) + (b) - 1) / (b))

INLINE vec load(const real *from) { return *(const vec *)from; }
INLINE void store(real *to, vec v) { *(vec *)to = v; }
INLINE void *allocate(size_t size) { return aligned_alloc(64, UP(size + 1, 64) * 64); }

/* Every other group of h numbers of two vectors in a row, from the o-th number on. PICK1(a, b, 0): the even ones. */
// clang-format off
#if BYTES / SIZE == 16
#define PICK8(a, b, o) \
    __builtin_shufflevector(a, b, o, o + 1, o + 2, o + 3, o + 4, o + 5, o + 6, o + 7, o + 16, o + 17, \
                            o + 18, o + 19, o + 20, o + 21, o + 22, o + 23)
#define PICK4(a, b, o) \
    __builtin_shufflevector(a, b, o, o + 1, o + 2, o + 3, o + 8, o + 9, o + 10, o + 11, o + 16, o + 17, \
                            o + 18, o + 19, o + 24, o + 25, o + 26, o + 27)
#define PICK2(a, b, o) \
    __builtin_shufflevector(a, b, o, o + 1, o + 4, o + 5, o + 8, o + 9, o + 12, o + 13, o + 16, o + 17, \
                            o + 20, o + 21, o + 24, o + 25, o + 28, o + 29)
#define PICK1(a, b, o) \
    __builtin_shufflevector(a, b, o, o + 2, o + 4, o + 6, o + 8, o + 10, o + 12, o + 14, o + 16, \
                            o + 18, o + 20, o + 22, o + 24, o + 26, o + 28, o + 30)
#elif BYTES / SIZE == 8
#define PICK4(a, b, o) __builtin_shufflevector(a, b, o, o + 1, o + 2, o + 3, o + 8, o + 9, o + 10, o + 11)
#define PICK2(a, b, o) __builtin_shufflevector(a, b, o, o + 1, o + 4, o + 5, o + 8, o + 9, o + 12, o + 13)
#define PICK1(a, b, o) __builtin_shufflevector(a, b, o, o + 2, o + 4, o + 6, o + 8, o + 10, o + 12, o + 14)
#elif BYTES / SIZE == 4
#define PICK2(a, b, o) __builtin_shufflevector(a, b, o, o + 1, o + 4, o + 5)
#define PICK1(a, b, o) __builtin_shufflevector(a, b, o, o + 2, o + 4, o + 6)
#else
#define PICK1(a, b, o) __builtin_shufflevector(a, b, o, o + 2)
#endif
// clang-format on

/* The totals of as many vectors as each has lanes, in one vector: halves are added until one number of each is left. */
#define FOLD(h, a, b) (PICK##h(a, b, 0) + PICK##h(a, b, h))
INLINE vec totals(const vec *v) {
#if BYTES / SIZE == 16
    vec a = FOLD(4, FOLD(8, v[0], v[1]), FOLD(8, v[2], v[3])), b = FOLD(4, FOLD(8, v[4], v[5]), FOLD(8, v[6], v[7]));
    vec c = FOLD(4, FOLD(8, v[8], v[9]), FOLD(8, v[10], v[11])),
        d = FOLD(4, FOLD(8, v[12], v[13]), FOLD(8, v[14], v[15]));
    return FOLD(1, FOLD(2, a, b), FOLD(2, c, d));
#elif BYTES / SIZE == 8
    return FOLD(1, FOLD(2, FOLD(4, v[0], v[1]), FOLD(4, v[2], v[3])),
                FOLD(2, FOLD(4, v[4], v[5]), FOLD(4, v[6], v[7])));
#elif BYTES / SIZE == 4
    return FOLD(1, FOLD(2, v[0], v[1]), FOLD(2, v[2], v[3]));
#else
    return FOLD(1, v[0], v[1]);
#endif
}
