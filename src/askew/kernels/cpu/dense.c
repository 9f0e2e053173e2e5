/* Gradients, or SGD steps, of networks of linear layers with or without a ReLU behind each, under the mean
   cross-entropy.

   All three products of a layer keep a block of sums in registers: outputs are dot products, as rows of weights lie;
   gradients of weights and of inputs are sums of rows.

   Repeated here from Python, each held by a test in tests/kernels/test_dense.py: the mean cross-entropy and its
   gradient (core/task.py), norm clipping (core/algebra.py), weight decay, momentum and the step (core/algorithm.py),
   and the affine direction (core/types.py). */

#include <math.h>

#define NOINLINE static __attribute__((noinline)) /* loops that need all registers for themselves */

typedef struct {
    int64_t in, out;      /* widths */
    int64_t weight, bias; /* indices in the row of all parameters; bias: -1 for none */
    int64_t relu;         /* does a ReLU follow? */
} layer;

#define M (MANY ? 4 : 2) /* rows and columns of a block of dot products, a multiple of LANES in all */
#define N 4
#define R (BYTES == 16 ? 10 : MANY ? 8 : 4) /* rows and vectors of a block of sums of rows */
#define V (BYTES == 16 ? 2 : 3)

/* The last numbers of a row, fewer than a vector: those before them are read as well, and put to zero. */
INLINE vec last(const real *row, int64_t length, mask valid) {
    if (length >= LANES) return (vec)(valid & (mask)load(row + length - LANES));
    vec v = {};
    memcpy((real *)&v + LANES - length, row, length * SIZE);
    return v;
}

INLINE mask valid_lanes(int64_t length) {
    mask valid;
    for (int l = 0; l < LANES; l++) valid[l] = l >= LANES - length % LANES ? -1 : 0;
    return valid;
}

/* y [m, n] = rows of x [m, depth] times rows of w [n, depth]; m and n are constants */
INLINE void dots(const int m, const int n, int64_t depth, const real *x, const real *w, real *y, int64_t stride) {
    vec sum[M * N] = {};
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
        vec right[N];
        for (int j = 0; j < n; j++) right[j] = load(w + j * depth + k);
        for (int i = 0; i < m; i++) {
            vec left = load(x + i * depth + k);
            for (int j = 0; j < n; j++) sum[i * N + j] += left * right[j];
        }
    }
    if (k < depth) {
        mask valid = valid_lanes(depth);
        vec right[N];
        for (int j = 0; j < n; j++) right[j] = last(w + j * depth, depth, valid);
        for (int i = 0; i < m; i++) {
            vec left = last(x + i * depth, depth, valid);
            for (int j = 0; j < n; j++) sum[i * N + j] += left * right[j];
        }
    }
    real value[M * N];
    for (int i = 0; i < m * N; i += LANES) store(value + i, totals(sum + i));
    for (int i = 0; i < m; i++) memcpy(y + i * stride, value + i * N, n * SIZE);
}

INLINE void dots_of(const int n, int64_t rows, int64_t in, int64_t out, const real *x, const real *w, real *y) {
    int64_t i = 0;
    for (; i + M <= rows; i += M) dots(M, n, in, x + i * in, w, y + i * out, out);
    for (; i + 2 <= rows; i += 2) dots(2, n, in, x + i * in, w, y + i * out, out);
    if (i < rows) dots(1, n, in, x + i * in, w, y + i * out, out);
}

NOINLINE void outputs(int64_t rows, int64_t in, int64_t out, const real *x, const real *w, const real *bias, int relu,
                   real *y) {
    int64_t j = 0;
    for (; j + N <= out; j += N) dots_of(N, rows, in, out, x, w + j * in, y + j);
    for (; j < out; j++) dots_of(1, rows, in, out, x, w + j * in, y + j);
    for (int64_t i = 0; i < rows; i++, y += out)
        for (j = 0; j < out; j++) {
            real value = bias ? y[j] + bias[j] : y[j];
            y[j] = relu && value <= 0 ? 0 : value;
        }
}

/* Sums of rows: to [rows, width] = sum over k of a[k * depth_stride + row * row_stride] times b[k, width].
   add: `scale` times that is added to what is there; gate: zero where it is not above zero. */
typedef struct {
    int64_t depth, depth_stride, row_stride, width;
    const real *a, *b, *gate;
    real scale, *to;
    int add;
} product;

/* r rows from i on, v vectors from the j-th number on, added only where `valid` says so; r and v are constants */
INLINE void sums(const int r, const int v, const product p, int64_t i, int64_t j, mask valid) {
    vec sum[R][V];
    for (int n = 0; n < r; n++) {
        if (p.add) __builtin_prefetch(p.to + (i + n) * p.width + j, 1); /* it is needed when the sums are done */
        for (int q = 0; q < v; q++) sum[n][q] = (vec){};
    }
    for (int64_t k = 0; k < p.depth; k++) {
        vec row[V];
        for (int q = 0; q < v; q++) row[q] = load(p.b + k * p.width + j + q * LANES);
        for (int n = 0; n < r; n++)
            for (int q = 0; q < v; q++) sum[n][q] += row[q] * p.a[k * p.depth_stride + (i + n) * p.row_stride];
    }
    for (int n = 0; n < r; n++)
        for (int q = 0; q < v; q++) {
            int64_t index = (i + n) * p.width + j + q * LANES;
            vec s = sum[n][q];
            if (p.add) {
                vec old = load(p.to + index), new = old + s * p.scale; /* rounded once, as a step of torch's is */
                s = (vec)((valid & (mask)new) | (~valid & (mask)old));
            }
            if (p.gate) s = (vec)((load(p.gate + index) > (vec){}) & (mask)s);
            store(p.to + index, s);
        }
}

NOINLINE void combine(int64_t rows, const product p) {
    if (p.width < LANES) {
        for (int64_t index = 0; index < rows * p.width; index++) {
            real s = 0;
            for (int64_t k = 0; k < p.depth; k++)
                s += p.a[k * p.depth_stride + index / p.width * p.row_stride] * p.b[k * p.width + index % p.width];
            p.to[index] = p.add ? p.to[index] + s * p.scale : p.gate && !(p.gate[index] > 0) ? 0 : s;
        }
        return;
    }
    mask valid = (mask){} - 1;
    for (int64_t j = 0; j < p.width;) {
        int v = p.width - j >= V * LANES ? V : 1;
        if (p.width - j < LANES)
            valid = valid_lanes(p.width), j = p.width - LANES; /* the last ones, and some before them that are done */
        int64_t i = 0;
        for (; i + R <= rows; i += R) v == V ? sums(R, V, p, i, j, valid) : sums(R, 1, p, i, j, valid);
        for (; i < rows; i++) v == V ? sums(1, V, p, i, j, valid) : sums(1, 1, p, i, j, valid);
        j += v * LANES;
    }
}

#if DOUBLE
#define EXP exp
#define LOG log
#define EXPM1 expm1
#else
#define EXP expf
#define LOG logf
#define EXPM1 expm1f
#endif

/* Returns the mean loss of outputs [rows, classes] with labels y; the outputs become its gradient. */
static real cross_entropy(int64_t rows, int64_t classes, real *out, const int64_t *y) {
    real loss = 0;
    for (int64_t i = 0; i < rows; i++, out += classes) {
        real largest = out[0], sum = 0;
        for (int64_t c = 1; c < classes; c++) largest = out[c] > largest || out[c] != out[c] ? out[c] : largest;
        for (int64_t c = 0; c < classes; c++) sum += EXP(out[c] - largest);
        real rest = LOG(sum), right = out[y[i]] - largest - rest; /* in this order: small losses keep their digits */
        loss -= right;
        for (int64_t c = 0; c < classes; c++) out[c] = EXP(out[c] - largest - rest) / rows;
        out[y[i]] = EXPM1(right) / rows;
    }
    return loss / rows;
}

/* One batch of one network with weights w: `factor` times its gradient is added to `to` if that is w itself, else the
   gradient is put there. Outputs of all layers go to `after`, gradients to `gradients`, which has room for those of two
   layers (`widest` numbers each) and for a bias. Returns the mean loss. */
static real batch(int64_t depth, const layer *layers, const real *w, real *to, real factor, int64_t rows, const real *x,
                  const int64_t *y, real *after, real *gradients, int64_t widest) {
    const real *before = x;
    real *g = after;
    for (int64_t l = 0; l < depth; l++) {
        const layer *at = layers + l;
        outputs(rows, at->in, at->out, before, w + at->weight, at->bias < 0 ? 0 : w + at->bias, at->relu, g);
        before = g;
        g += rows * at->out;
    }
    g -= rows * layers[depth - 1].out;
    real loss = cross_entropy(rows, layers[depth - 1].out, g, y);
    const real *end = g;
    for (int64_t l = depth - 1; l >= 0; l--) {
        const layer *at = layers + l;
        real *next = gradients + l % 2 * widest;
        before = l ? end - rows * at->in : x;
        end = before;
        product back = {at->out, 1, at->out, at->in, g, w + at->weight, l && at[-1].relu ? before : 0, 1, next, 0};
        product gradient = {rows, at->out, 1, at->in, g, before, 0, factor, to + at->weight, to == w};
        if (l) combine(rows, back);
        combine(at->out, gradient);
        if (at->bias >= 0) {
            real *sum = gradients + 2 * widest;
            memset(sum, 0, at->out * SIZE);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t o = 0; o < at->out; o++) sum[o] += g[i * at->out + o];
            for (int64_t o = 0; o < at->out; o++)
                to[at->bias + o] = to == w ? to[at->bias + o] + factor * sum[o] : sum[o];
        }
        g = next;
    }
    return loss;
}

typedef struct {
    double gain, pull; /* where there is a shift, the direction is gain times the gradient + pull times w + shift */
    double momentum, decay, clip; /* 0 for none; for clip infinity */
} rule;

/* `factor` times the clipped direction, with decay and momentum v, is added to w [size]; g becomes the direction. */
static void descend(const rule how, int64_t size, real *g, real factor, const real *shift, real *v, real *w) {
    if (shift) {
        real gain = how.gain, pull = how.pull;
        for (int64_t i = 0; i < size; i++) g[i] = gain * g[i] + (pull * w[i] + shift[i]);
    }
    real scale = 1, decay = how.decay, momentum = how.momentum;
    if (how.clip < INFINITY) {
        double square = 0;
        for (int64_t i = 0; i < size; i++) square += (double)g[i] * g[i];
        double shorter = how.clip / (sqrt(square) + 1e-6);
        scale = shorter < 1 ? shorter : 1;
    }
    for (int64_t i = 0; i < size; i++) {
        real d = g[i] * scale + decay * w[i];
        if (v) d = v[i] = momentum * v[i] + d;
        w[i] += factor * d;
    }
}

/* Many networks w [count, stride], each on `steps` batches given by where they begin and end in x and y: spans [count,
   steps, 2]. The sums of their losses go to `values`. Without a rule, `factor` times the gradient is added to w, or put
   to `to` if that is another matrix; with one, networks of `size` parameters step by it, with momentum v and a shift
   [count, stride] where these are given. Returns 0; 1 without memory; 2 if a label is no class. */
int train(int64_t depth, const layer *layers, int64_t count, int64_t stride, real *w, real *to, real factor,
          const rule *how, int64_t size, const real *shift, real *v, int64_t steps, const int64_t *spans, const real *x,
          const int64_t *y, real *values) {
    int64_t largest = 0, widest = 0, total = 0;
    for (int64_t s = 0; s < count * steps; s++) {
        largest = spans[2 * s + 1] - spans[2 * s] > largest ? spans[2 * s + 1] - spans[2 * s] : largest;
        for (int64_t i = spans[2 * s]; i < spans[2 * s + 1]; i++)
            if (y[i] < 0 || y[i] >= layers[depth - 1].out) return 2;
    }
    for (int64_t l = 0; l < depth; l++) {
        total += layers[l].out;
        widest = layers[l].out > widest ? layers[l].out : widest;
    }
    real *after = allocate(largest * total * SIZE), *gradients = allocate((2 * largest + 1) * widest * SIZE),
         *g = how ? allocate(size * SIZE) : 0;
    int no_memory = !after || !gradients || (how && !g);
    for (int64_t c = 0; c < count && !no_memory; c++, w += stride, to += stride) {
        values[c] = 0;
        for (int64_t s = 0; s < steps; s++, spans += 2) {
            values[c] += batch(depth, layers, w, how ? g : to, factor, spans[1] - spans[0], x + spans[0] * layers[0].in,
                               y + spans[0], after, gradients, largest * widest);
            if (how) descend(*how, size, g, factor, shift ? shift + c * stride : 0, v ? v + c * stride : 0, w);
        }
    }
    free(after), free(gradients), free(g);
    return no_memory;
}
