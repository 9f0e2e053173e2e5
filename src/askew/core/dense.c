/* Gradients, or plain SGD steps, of networks of linear layers with or without a ReLU behind each, under the mean cross-entropy.

   All three products of a layer keep a block of sums in registers: outputs are dot products, as rows of weights lie; slopes of
   weights and of inputs are sums of rows.

   Images that are mostly background, and come as bytes, are listed without it where several steps are taken. The first layer's
   weights lie turned meanwhile, so that its outputs, and slopes of weights, are sums of those rows that are listed. */

#include <math.h>

#define APART static __attribute__((noinline)) /* loops that need all registers for themselves */

typedef struct {
    int64_t in, out, weight, bias, relu; /* widths, places in the row of all parameters (bias: -1 for none), and whether a ReLU follows */
} layer;

#define M (MANY ? 4 : 2) /* rows and columns of a block of dot products, a multiple of LANES in all */
#define N 4
#define R (BYTES == 16 ? 10 : MANY ? 8 : 4) /* rows and vectors of a block of sums of rows */
#define V (BYTES == 16 ? 2 : 3)

/* The last numbers of a row, fewer than a vector: those before them are taken along, and put to zero. */
INLINE vec last(const real *row, int64_t length, mask own) {
    if (length >= LANES) return (vec)(own & (mask)load(row + length - LANES));
    vec v = {};
    memcpy((real *)&v + LANES - length, row, length * SIZE);
    return v;
}

INLINE mask own_of(int64_t length) {
    mask own;
    for (int l = 0; l < LANES; l++) own[l] = l >= LANES - length % LANES ? -1 : 0;
    return own;
}

/* y [m, n] = rows of x [m, depth] times rows of w [n, depth]; m and n are constants */
INLINE void dots(const int m, const int n, int64_t depth, const real *x, const real *w, real *y, int64_t apart) {
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
        mask own = own_of(depth);
        vec right[N];
        for (int j = 0; j < n; j++) right[j] = last(w + j * depth, depth, own);
        for (int i = 0; i < m; i++) {
            vec left = last(x + i * depth, depth, own);
            for (int j = 0; j < n; j++) sum[i * N + j] += left * right[j];
        }
    }
    real value[M * N];
    for (int i = 0; i < m * N; i += LANES) store(value + i, totals(sum + i));
    for (int i = 0; i < m; i++) memcpy(y + i * apart, value + i * N, n * SIZE);
}

INLINE void dots_of(const int n, int64_t rows, int64_t in, int64_t out, const real *x, const real *w, real *y) {
    int64_t i = 0;
    for (; i + M <= rows; i += M) dots(M, n, in, x + i * in, w, y + i * out, out);
    for (; i + 2 <= rows; i += 2) dots(2, n, in, x + i * in, w, y + i * out, out);
    if (i < rows) dots(1, n, in, x + i * in, w, y + i * out, out);
}

APART void outputs(int64_t rows, int64_t in, int64_t out, const real *x, const real *w, const real *bias, int relu, real *y) {
    int64_t j = 0;
    for (; j + N <= out; j += N) dots_of(N, rows, in, out, x, w + j * in, y + j);
    for (; j < out; j++) dots_of(1, rows, in, out, x, w + j * in, y + j);
    for (int64_t i = 0; i < rows; i++, y += out)
        for (j = 0; j < out; j++) {
            real value = bias ? y[j] + bias[j] : y[j];
            y[j] = relu && value <= 0 ? 0 : value;
        }
}

/* Sums of rows: to [rows, width] = sum over k of a[k * down + row * along] times b[k, width].
   keep: `by` times that is added to what is there; gate: zero where it is not above zero. */
typedef struct {
    int64_t depth, down, along, width;
    const real *a, *b, *gate;
    real by, *to;
    int keep;
} product;

/* r rows from i on, v vectors from the j-th number on, of which only those in `own` are to be added; r and v are constants */
INLINE void sums(const int r, const int v, const product p, int64_t i, int64_t j, mask own) {
    vec sum[R][V];
    for (int n = 0; n < r; n++) {
        if (p.keep) __builtin_prefetch(p.to + (i + n) * p.width + j, 1); /* it is needed when the sums are done */
        for (int q = 0; q < v; q++) sum[n][q] = (vec){};
    }
    for (int64_t k = 0; k < p.depth; k++) {
        vec row[V];
        for (int q = 0; q < v; q++) row[q] = load(p.b + k * p.width + j + q * LANES);
        for (int n = 0; n < r; n++)
            for (int q = 0; q < v; q++) sum[n][q] += row[q] * p.a[k * p.down + (i + n) * p.along];
    }
    for (int n = 0; n < r; n++)
        for (int q = 0; q < v; q++) {
            int64_t spot = (i + n) * p.width + j + q * LANES;
            vec s = sum[n][q];
            if (p.keep) {
                vec old = load(p.to + spot), new = old + s * p.by; /* rounded once, as a step of torch's is */
                s = (vec)((own & (mask)new) | (~own & (mask)old));
            }
            if (p.gate) s = (vec)((load(p.gate + spot) > (vec){}) & (mask)s);
            store(p.to + spot, s);
        }
}

APART void combine(int64_t rows, const product p) {
    if (p.width < LANES) {
        for (int64_t spot = 0; spot < rows * p.width; spot++) {
            real s = 0;
            for (int64_t k = 0; k < p.depth; k++) s += p.a[k * p.down + spot / p.width * p.along] * p.b[k * p.width + spot % p.width];
            p.to[spot] = p.keep ? p.to[spot] + s * p.by : p.gate && !(p.gate[spot] > 0) ? 0 : s;
        }
        return;
    }
    mask own = (mask){} - 1;
    for (int64_t j = 0; j < p.width;) {
        int v = p.width - j >= V * LANES ? V : 1;
        if (p.width - j < LANES) own = own_of(p.width), j = p.width - LANES; /* the last ones, and some before them that are done */
        int64_t i = 0;
        for (; i + R <= rows; i += R) v == V ? sums(R, V, p, i, j, own) : sums(R, 1, p, i, j, own);
        for (; i < rows; i++) v == V ? sums(1, V, p, i, j, own) : sums(1, 1, p, i, j, own);
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

/* the mean loss, and its slopes in place of the outputs */
static real judge(int64_t rows, int64_t classes, real *out, const int64_t *y) {
    real loss = 0;
    for (int64_t i = 0; i < rows; i++, out += classes) {
        real most = out[0], sum = 0;
        for (int64_t c = 1; c < classes; c++) most = out[c] > most || out[c] != out[c] ? out[c] : most;
        for (int64_t c = 0; c < classes; c++) sum += EXP(out[c] - most);
        real rest = LOG(sum), right = out[y[i]] - most - rest; /* in this order: small losses keep their digits */
        loss -= right;
        for (int64_t c = 0; c < classes; c++) out[c] = EXP(out[c] - most - rest) / rows;
        out[y[i]] = EXPM1(right) / rows;
    }
    return loss / rows;
}

/* What stands out of the background, in lines: of each image its pixels, or of each pixel its images. Four places of a line follow
   each other, as they are worked on; what is missing to the last four is zero times the first row. */
#define FOUR 4
typedef struct {
    int32_t at[FOUR]; /* where the row begins that is to be added */
    real value[FOUR]; /* times which */
} four;

typedef struct {
    int64_t fours;  /* of a line */
    int32_t *count; /* of places that are taken, by line */
    four *places;
} list;

/* The first layer on such images: its weights are strips [in, wide] of outputs; beyond the last output they are zero. */
typedef struct {
    int64_t in, out, strips, wide;
    int ground;              /* the byte that the background is */
    real level, values[256]; /* the number it stands for, and what to add to that for any byte */
    list images, pixels;
    int32_t *noted;       /* pixels of an image */
    real *strip;          /* outputs, or their slopes [rows, wide] */
    real *sums, *columns; /* of the numbers of an image, by image; of the weights of an output, by output */
    int summed;           /* are the weights' as they should be? */
} thin;

#define WIDEST (BYTES == 16 ? 10 : BYTES == 32 ? 5 : 7) /* vectors of a strip */

INLINE void put(four *line, uint32_t n, int32_t at, real value) { line[n / FOUR].at[n % FOUR] = at, line[n / FOUR].value[n % FOUR] = value; }

INLINE void close(four *line, uint32_t count) {
    for (int k = 0; k < FOUR - 1; k++) put(line, count + k, 0, 0);
}

/* Of eight pixels that are not all background, all are noted, and those stay that are none. */
INLINE int32_t note(const int count, const uint8_t *x, int ground, int64_t pixel, int32_t *noted, int32_t n) {
    uint64_t all = ground * 0x0101010101010101u, eight = all;
    memcpy(&eight, x, count);
    if (eight == all) return n;
    for (int k = 0; k < count; k++) noted[n] = pixel + k, n += (uint8_t)(eight >> 8 * k) != ground;
    return n;
}

static void enlist(thin *p, int64_t rows, const uint8_t *pool, const int64_t *places) {
    const list images = p->images, pixels = p->pixels;
    const int64_t in = p->in, wide = p->wide;
    const int ground = p->ground;
    int32_t *noted = p->noted, n;
    memset(pixels.count, 0, in * sizeof(int32_t));
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *x = pool + places[r] * in;
        int64_t i = n = 0;
        for (; i + 8 <= in; i += 8) n = note(8, x + i, ground, i, noted, n);
        for (; i < in; i++) n = note(1, x + i, ground, i, noted, n);
        four *image = images.places + r * images.fours;
        real sum = in * p->level;
        for (int32_t k = 0; k < n; k++) {
            const int32_t pixel = noted[k];
            const real value = p->values[x[pixel]];
            put(image, k, pixel * wide, value);
            put(pixels.places + pixel * pixels.fours, pixels.count[pixel]++, r * wide, value);
            sum += value;
        }
        close(image, n);
        images.count[r] = n, p->sums[r] = sum;
    }
    for (int64_t i = 0; i < in; i++) close(pixels.places + i * pixels.fours, pixels.count[i]);
}

#if BYTES == 16 /* four numbers in a register, instead of a load for each */
typedef real values __attribute__((vector_size(FOUR * SIZE), aligned(SIZE), may_alias));
#define VALUES(from) (*(const values *)(from))
#else
typedef const real *values;
#define VALUES(from) (from)
#endif

/* to [lines, v vectors]: `first` and the listed rows of b; with keep, by times that is added to what is there */
INLINE void gather(const int v, int64_t lines, const list l, const real *first, const real *b, const int keep, real by, real *to) {
    for (int64_t i = 0; i < lines; i++, to += v * LANES) {
        vec sum[WIDEST];
        for (int q = 0; q < v; q++) sum[q] = load(first + q * LANES);
        const four *place = l.places + i * l.fours, *end = place + UP(l.count[i], FOUR);
        for (; place < end; place++) {
            values value = VALUES(place->value);
            for (int k = 0; k < FOUR; k++) {
                const real *row = b + place->at[k];
                __asm__("" : "+r"(row)); /* one address for all of a row */
                for (int q = 0; q < v; q++) sum[q] += load(row + q * LANES) * value[k];
            }
        }
        for (int q = 0; q < v; q++) {
            if (keep) sum[q] = load(to + q * LANES) + sum[q] * by;
            store(to + q * LANES, sum[q]);
        }
    }
}

APART void gathered(int64_t wide, int64_t lines, const list l, const real *first, const real *b, int keep, real by, real *to) {
#define CASE(v) \
    case v: \
        if (v <= WIDEST) keep ? gather(v, lines, l, first, b, 1, by, to) : gather(v, lines, l, first, b, 0, by, to); \
        break;
    switch (wide / LANES) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) }
}

static void thin_outputs(thin *p, int64_t rows, const uint8_t *pool, const int64_t *places, const real *w, const real *bias, int relu, real *y) {
    enlist(p, rows, pool, places);
    for (int64_t k = 0; k < p->out; k += p->wide, w += p->in * p->wide) {
        int64_t wide = p->out - k < p->wide ? p->out - k : p->wide;
        real first[WIDEST * LANES] = {};
        if (p->level && !p->summed) {
            memset(p->columns + k, 0, p->wide * SIZE);
            for (int64_t i = 0; i < p->in; i++)
                for (int64_t j = 0; j < p->wide; j++) p->columns[k + j] += w[i * p->wide + j];
        }
        for (int64_t j = 0; j < wide; j++) first[j] = (p->level ? p->level * p->columns[k + j] : 0) + (bias ? bias[k + j] : 0);
        gathered(p->wide, rows, p->images, first, w, 0, 0, p->strip);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < wide; j++) {
                real value = p->strip[i * p->wide + j];
                y[i * p->out + k + j] = relu && value <= 0 ? 0 : value;
            }
    }
}

/* of the images that were listed last, whose outputs have slopes g */
static void thin_slopes(thin *p, int64_t rows, const real *g, int keep, real by, real *to) {
    for (int64_t k = 0; k < p->out; k += p->wide, to += p->in * p->wide) {
        int64_t wide = p->out - k < p->wide ? p->out - k : p->wide;
        real first[WIDEST * LANES] = {}, column[WIDEST * LANES] = {};
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < p->wide; j++) {
                real value = j < wide ? g[i * p->out + k + j] : 0;
                p->strip[i * p->wide + j] = value;
                first[j] += p->level * value, column[j] += p->sums[i] * value;
            }
        gathered(p->wide, p->in, p->pixels, first, p->strip, keep, by, to);
        for (int64_t j = 0; j < wide; j++) p->columns[k + j] += by * column[j];
    }
    p->summed = keep;
}

/* A square block, turned. Of every two vectors in a row the even numbers come first and the odd ones last; done once for each time
   that the number of lanes can be halved, that makes columns of rows. */
INLINE void flip(const real *from, int64_t apart, real *to, int64_t beside) {
    vec v[LANES], next[LANES];
    for (int k = 0; k < LANES; k++) v[k] = load(from + k * apart);
    for (int left = LANES; left > 1; left /= 2) {
        for (int k = 0; k < LANES / 2; k++) next[k] = PICK1(v[2 * k], v[2 * k + 1], 0), next[k + LANES / 2] = PICK1(v[2 * k], v[2 * k + 1], 1);
        for (int k = 0; k < LANES; k++) v[k] = next[k];
    }
    for (int k = 0; k < LANES; k++) store(to + k * beside, v[k]);
}

/* A row of `size` numbers with weights [out, in] at a place, to one with strips there, or back */
static void turn(const thin *p, int64_t size, int64_t place, real *row, real *turned, int back) {
    real *w = row + place, *t = turned + place, *rest = t + p->strips * p->wide * p->in;
    const int64_t in = p->in, wide = p->wide, own = in * p->out;
    memcpy(back ? row : turned, back ? turned : row, place * SIZE);
    memcpy(back ? w + own : rest, back ? rest : w + own, (size - place - own) * SIZE);
    for (int64_t k = 0; k < p->strips * wide; k += LANES) {
        real *strip = t + k / wide * wide * in + k % wide;
        int64_t i = 0, whole = k + LANES <= p->out ? LANES : p->out > k ? p->out - k : 0;
        for (; i + LANES <= in && whole == LANES; i += LANES)
            if (back) flip(strip + i * wide, wide, w + k * in + i, in);
            else flip(w + k * in + i, in, strip + i * wide, wide);
        for (; i < in; i++)
            for (int64_t j = 0; j < LANES; j++)
                if (!back) strip[i * wide + j] = j < whole ? w[(k + j) * in + i] : 0;
                else if (j < whole) w[(k + j) * in + i] = strip[i * wide + j];
    }
}

/* One batch of one network with weights w: by times its gradient is added to `to`, if that is w itself, else put there.
   Outputs of all layers go to `after`, slopes to `slopes`, which has room for those of two layers and for a bias.
   If the first layer is thin, inputs are those at `places` in a pool. */
static real batch(int64_t depth, const layer *layers, thin *first, const real *w, real *to, real by, int64_t rows, const real *x, const uint8_t *pool,
                  const int64_t *places, const int64_t *y, real *after, real *slopes, int64_t wide) {
    const real *before = x;
    real *g = after;
    for (int64_t l = 0; l < depth; l++) {
        const layer *at = layers + l;
        const real *bias = at->bias < 0 ? 0 : w + at->bias;
        if (l || !first) outputs(rows, at->in, at->out, before, w + at->weight, bias, at->relu, g);
        else thin_outputs(first, rows, pool, places, w + at->weight, bias, at->relu, g);
        before = g;
        g += rows * at->out;
    }
    g -= rows * layers[depth - 1].out;
    real loss = judge(rows, layers[depth - 1].out, g, y);
    const real *end = g;
    for (int64_t l = depth - 1; l >= 0; l--) {
        const layer *at = layers + l;
        real *next = slopes + l % 2 * wide;
        before = l ? end - rows * at->in : x;
        end = before;
        product back = {at->out, 1, at->out, at->in, g, w + at->weight, l && at[-1].relu ? before : 0, 1, next, 0};
        product slope = {rows, at->out, 1, at->in, g, before, 0, by, to + at->weight, to == w};
        if (l) combine(rows, back);
        if (l || !first) combine(at->out, slope);
        else thin_slopes(first, rows, g, to == w, by, to + at->weight);
        if (at->bias >= 0) {
            real *sum = slopes + 2 * wide;
            memset(sum, 0, at->out * SIZE);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t o = 0; o < at->out; o++) sum[o] += g[i * at->out + o];
            for (int64_t o = 0; o < at->out; o++) to[at->bias + o] = to == w ? to[at->bias + o] + by * sum[o] : sum[o];
        }
        g = next;
    }
    return loss;
}

typedef struct {
    double gain, pull;            /* where there is a b, the direction is gain times the gradient, plus pull times w, plus b */
    double momentum, decay, clip; /* 0 for none, or for clip infinity */
} rule;

/* by times the clipped direction, with decay and momentum v, is added to w, all of this size; g becomes the direction */
static void descend(const rule how, int64_t size, real *g, real by, const real *b, real *v, real *w) {
    if (b) {
        real gain = how.gain, pull = how.pull;
        for (int64_t i = 0; i < size; i++) g[i] = gain * g[i] + (pull * w[i] + b[i]);
    }
    real scale = 1, decay = how.decay, momentum = how.momentum;
    if (how.clip < INFINITY) {
        double square = 0;
        for (int64_t i = 0; i < size; i++) square += (double)g[i] * g[i];
        double factor = how.clip / (sqrt(square) + 1e-6);
        scale = factor < 1 ? factor : 1;
    }
    for (int64_t i = 0; i < size; i++) {
        real d = g[i] * scale + decay * w[i];
        if (v) d = v[i] = momentum * v[i] + d;
        w[i] += by * d;
    }
}

/* Memory that is given back together; full: some was not to be had */
typedef struct {
    void *parts[16];
    int count, full;
} memory;

static void *take(memory *m, size_t size) {
    void *part = room(size);
    m->full |= !part;
    return m->parts[m->count++] = part;
}

static list lines(memory *m, int64_t count, int64_t most) {
    int64_t fours = UP(most + FOUR - 1, FOUR); /* with those that close a line */
    return (list){fours, take(m, count * sizeof(int32_t)), take(m, count * fours * sizeof(four))};
}

/* The first layer on images of which more than half is one byte, by the first ones of a batch with at most so many; else 0 */
static int is_thin(thin *p, memory *m, const layer *first, int64_t rows, int64_t most, const uint8_t *pool, const int64_t *places, const real *table) {
    int64_t seen[256] = {}, vectors = UP(first->out, LANES), strips = UP(vectors, WIDEST);
    rows = rows < 10 ? rows : 10;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < first->in; i++) seen[pool[places[r] * first->in + i]]++;
    *p = (thin){first->in, first->out, strips, UP(vectors, strips) * LANES};
    while (p->ground < 256 && 2 * seen[p->ground] <= rows * first->in) p->ground++;
    if (p->ground == 256) return 0;
    p->level = table[p->ground];
    for (int byte = 0; byte < 256; byte++) p->values[byte] = table[byte] - p->level;
    p->images = lines(m, most, p->in), p->pixels = lines(m, p->in, most);
    p->noted = take(m, p->in * sizeof(int32_t)), p->strip = take(m, most * p->wide * SIZE);
    p->sums = take(m, most * SIZE), p->columns = take(m, strips * p->wide * SIZE);
    return 1;
}

/* Many networks w [count, apart], each with steps batches, given by where they begin and end in x and y: spans [count, steps, 2].
   The sums of their losses go to values. With a rule, networks of this size step by it, their momentum being v [count, apart];
   b, of the same shape, is what it adds to their directions. With a table, x are those at `places` in a pool of bytes, which stand for
   the numbers of the table.
   Returns 0, 1 if there is no memory, or 2 if there is no such class. */
int walk(int64_t depth, const layer *layers, int64_t count, int64_t apart, real *w, real *to, real by, const rule *how, int64_t size, real *b, real *v,
         int64_t steps, const int64_t *spans, const void *x, const int64_t *places, const real *table, const int64_t *y, real *values) {
    const int64_t in = layers[0].in, place = layers[0].weight;
    int64_t most = 0, wide = 0, all = 0;
    for (int64_t s = 0; s < count * steps; s++) {
        most = spans[2 * s + 1] - spans[2 * s] > most ? spans[2 * s + 1] - spans[2 * s] : most;
        for (int64_t i = spans[2 * s]; i < spans[2 * s + 1]; i++)
            if (y[i] < 0 || y[i] >= layers[depth - 1].out) return 2;
    }
    for (int64_t l = 0; l < depth; l++) all += layers[l].out, wide = layers[l].out > wide ? layers[l].out : wide;
    memory m = {};
    real *after = take(&m, most * all * SIZE), *slopes = take(&m, (2 * most + 1) * wide * SIZE), *seen = 0;

    thin own;
    thin *first = table && steps > 1 && to == w && is_thin(&own, &m, layers, spans[1] - spans[0], most, x, places + spans[0], table) ? &own : 0;
    if (table && !first) seen = take(&m, most * in * SIZE);
    int64_t more = first ? in * (own.strips * own.wide - own.out) : 0; /* numbers in a row that is turned, behind the first layer's weights */
    layer layout[depth];
    for (int64_t l = 0; l < depth; l++) {
        layout[l] = layers[l];
        layout[l].weight += layers[l].weight > place ? more : 0;
        layout[l].bias += layers[l].bias > place ? more : 0;
    }
    size_t turned = (size + more) * SIZE;
    real *g = how ? take(&m, turned) : 0, *given[3] = {w, b, v}, *rows[3]; /* rows: of the network at work, what is given */
    for (int k = 0; k < 3; k++) rows[k] = first && given[k] ? take(&m, turned) : 0;

    for (int64_t c = 0; c < count && !m.full; c++, to += apart) {
        for (int k = 0; k < 3; k++)
            if (!first) rows[k] = given[k] ? given[k] + c * apart : 0;
            else if (given[k]) turn(first, size, place, given[k] + c * apart, rows[k], 0);
        real *now = rows[0];
        values[c] = own.summed = 0;
        for (int64_t s = 0; s < steps; s++, spans += 2) {
            const int64_t length = spans[1] - spans[0], *chosen = places + spans[0];
            const real *inputs = table ? seen : (const real *)x + spans[0] * in;
            for (int64_t r = 0; r < length && table && !first; r++) {
                const uint8_t *image = (const uint8_t *)x + chosen[r] * in;
                for (int64_t i = 0; i < in; i++) seen[r * in + i] = table[image[i]];
            }
            real *target = how ? g : first ? now : to;
            values[c] += batch(depth, layout, first, now, target, by, length, inputs, x, chosen, y + spans[0], after, slopes, most * wide);
            if (how) descend(*how, size + more, g, by, rows[1], rows[2], now);
        }
        for (int k = 0; k < 3 && first; k += 2)
            if (given[k]) turn(first, size, place, given[k] + c * apart, rows[k], 1);
    }
    while (m.count) free(m.parts[--m.count]);
    return m.full;
}
