/* Convolution, ReLU and 2x2 max-pooling of images, forward and back. Python defines the sizes: CI channels of H x W
   pixels, padded by PAD, go through CO filters of K x K; DOUBLE says whether numbers have 64 bits.

   Forward, an image is a run of pixels in which a filter's taps are shifts, so that vectors hold neighbouring places;
   those at the ends of rows, where a filter would go around the edge, are computed and never looked at. Backward, only
   the largest of four pixels has a gradient, and only if it is above zero: the patches below these few are gathered,
   the others skipped. */

typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define SUMS (BYTES == 16 ? 20 : MANY ? 24 : 12) /* vectors that fit the registers beside what is added to them */
#define HP (H + 2 * PAD)
#define WP (W + 2 * PAD)
#define HO ((HP - K + 1) / 2)
#define WO ((WP - K + 1) / 2)
#define OUT (HO * WO)
#define TAPS (CI * K * K)

#define FILTERS \
    (CO % 8 == 0 && MANY ? 8 : CO % 6 == 0 && MANY ? 6 : CO % 4 == 0 ? 4 : CO % 3 == 0 ? 3 : CO % 2 == 0 ? 2 : 1)
#define VECTORS (SUMS / FILTERS)         /* FILTERS x VECTORS sums are made at a time */
#define RUN ((2 * HO - 1) * WP + 2 * WO) /* places of one filter that are pooled, and the ends of rows between */
#define COVER (UP(RUN, VECTORS * LANES) * VECTORS * LANES) /* what whole blocks compute of them */
#define REACH (COVER + (K - 1) * (WP + 1))                 /* and read of a channel */
#define SPAN (REACH > HP * WP ? REACH : HP * WP)
#define PATCH UP(K * CI, LANES) /* vectors of one row of a patch, all channels of a pixel side by side */
#define AREA (HP * WP * CI + (PATCH + 1) * LANES)

static void convolve(const real *restrict x, const real *restrict w, const real *restrict bias, real *restrict out) {
    for (int c0 = 0; c0 < CO; c0 += FILTERS)
        for (int v0 = 0; v0 < COVER; v0 += VECTORS * LANES) {
            vec sum[FILTERS][VECTORS];
            for (int c = 0; c < FILTERS; c++)
                for (int v = 0; v < VECTORS; v++) sum[c][v] = (vec){} + bias[c0 + c];
            const real *from = x + v0, *tap = w + c0 * TAPS;
            for (int i = 0; i < CI; i++, from += SPAN)
                for (int ky = 0; ky < K; ky++)
                    for (int kx = 0; kx < K; kx++, tap++) {
                        vec in[VECTORS];
                        for (int v = 0; v < VECTORS; v++) in[v] = load(from + ky * WP + kx + v * LANES);
                        for (int c = 0; c < FILTERS; c++)
                            for (int v = 0; v < VECTORS; v++) sum[c][v] += in[v] * tap[c * TAPS];
                    }
            for (int c = 0; c < FILTERS; c++)
                for (int v = 0; v < VECTORS; v++) store(out + (c0 + c) * COVER + v0 + v * LANES, sum[c][v]);
        }
}

/* the larger one, and which; what is not a number counts as larger than all, the first of equals as larger */
INLINE void take(vec v, whole k, vec *best, mask *which) {
    mask larger = (v > *best) | (v != v);
    *best = (vec)((larger & (mask)v) | (~larger & (mask)*best));
    *which = (larger & k) | (~larger & *which);
}

/* writes beyond the end of a row, which the next row then overwrites: y and which have room for one vector more */
static void pool(const real *restrict out, real *restrict y, uint8_t *restrict which) {
    for (int c = 0; c < CO; c++)
        for (int r = 0; r < HO; r++)
            for (int q = 0; q < WO; q += LANES) {
                const real *up = out + c * COVER + 2 * r * WP + 2 * q, *down = up + WP;
                vec a = load(up), b = load(up + LANES), d = load(down), e = load(down + LANES), best = PICK1(a, b, 0);
                mask k = {};
                take(PICK1(a, b, 1), 1, &best, &k);
                take(PICK1(d, e, 0), 2, &best, &k);
                take(PICK1(d, e, 1), 3, &best, &k);
                mask dead = best <= (vec){};
                store(y + c * OUT + r * WO + q, (vec)(~dead & (mask)best));
                *(bytes *)(which + c * OUT + r * WO + q) = __builtin_convertvector((dead & 4) | (~dead & k), bytes);
            }
}

/* which: the place of the largest of four, row by row, or 4 where none is above zero. Returns 1 without memory. */
int forward(int64_t images, const real *x, const real *w, const real *bias, real *y, uint8_t *which) {
    real *in = allocate(CI * SPAN * SIZE), *out = allocate((CO * COVER + 2 * LANES) * SIZE),
         *pooled = allocate((CO * OUT + LANES) * SIZE);
    uint8_t *chosen = allocate(CO * OUT + LANES);
    int no_memory = !in || !out || !pooled || !chosen;
    if (!no_memory) {
        memset(in, 0, CI * SPAN * SIZE);
        memset(out + CO * COVER, 0, 2 * LANES * SIZE);
    }
    for (int64_t s = 0; s < images && !no_memory; s++) {
        for (int c = 0; c < CI; c++)
            for (int r = 0; r < H; r++)
                memcpy(in + c * SPAN + (r + PAD) * WP + PAD, x + ((s * CI + c) * H + r) * W, W * SIZE);
        convolve(in, w, bias, out);
        pool(out, pooled, chosen);
        memcpy(y + s * CO * OUT, pooled, CO * OUT * SIZE);
        memcpy(which + s * CO * OUT, chosen, CO * OUT);
    }
    free(in), free(out), free(pooled), free(chosen);
    return no_memory;
}

/* One image with the channels of a pixel side by side, padded. */
static void interleave(const real *restrict x, real *restrict in) {
    for (int r = 0; r < H; r++)
        for (int q = 0; q < W; q++)
            for (int i = 0; i < CI; i++) in[((r + PAD) * WP + q + PAD) * CI + i] = x[(i * H + r) * W + q];
}

/* Gradients g behind the pooled pixels give those of weights, bias and, unless dx is NULL, of the images. */
int backward(int64_t images, const real *g, const real *x, const real *w, const uint8_t *which, real *dw, real *db,
             real *dx) {
    real *in = allocate(AREA * SIZE), *back = allocate(AREA * SIZE), *gradient = allocate(OUT * SIZE + SIZE);
    vec *sums = allocate(CO * K * PATCH * BYTES), *taps = allocate(CO * K * PATCH * BYTES);
    int *index = allocate((OUT + 1) * sizeof(int)), no_memory = !in || !back || !gradient || !sums || !taps || !index;
    if (!no_memory) {
        memset(in, 0, AREA * SIZE);
        memset(sums, 0, CO * K * PATCH * BYTES);
        memset(taps, 0, CO * K * PATCH * BYTES);
        memset(db, 0, CO * SIZE);
        for (int c = 0; c < CO && dx; c++)
            for (int i = 0; i < CI; i++)
                for (int k = 0; k < K * K; k++)
                    ((real *)(taps + (c * K + k / K) * PATCH))[k % K * CI + i] = w[(c * CI + i) * K * K + k];
    }
    for (int64_t s = 0; s < images && !no_memory; s++) {
        interleave(x + s * CI * H * W, in);
        if (dx) memset(back, 0, AREA * SIZE);
        for (int c = 0; c < CO; c++) {
            int count = 0; /* of pixels with a gradient: where their patches begin, and the gradients */
            for (int r = 0, p = 0; r < HO; r++)
                for (int q = 0; q < WO; q++, p++) {
                    int k = which[(s * CO + c) * OUT + p];
                    index[count] = ((2 * r + (k >> 1)) * WP + 2 * q + (k & 1)) * CI;
                    gradient[count] = g[(s * CO + c) * OUT + p];
                    count += k < 4;
                }
            real total = 0;
            vec sum[K][PATCH];
            memcpy(sum, sums + c * K * PATCH, sizeof(sum));
            for (int p = 0; p < count; p++) {
                for (int ky = 0; ky < K; ky++)
                    for (int v = 0; v < PATCH; v++)
                        sum[ky][v] += load(in + index[p] + ky * WP * CI + v * LANES) * gradient[p];
                total += gradient[p];
            }
            db[c] += total;
            memcpy(sums + c * K * PATCH, sum, sizeof(sum));
            for (int p = 0; p < count && dx; p++)
                for (int ky = 0; ky < K; ky++)
                    for (int v = 0; v < PATCH; v++) {
                        real *to = back + index[p] + ky * WP * CI + v * LANES;
                        store(to, load(to) + taps[(c * K + ky) * PATCH + v] * gradient[p]);
                    }
        }
        for (int i = 0; i < CI && dx; i++)
            for (int r = 0; r < H; r++)
                for (int q = 0; q < W; q++)
                    dx[((s * CI + i) * H + r) * W + q] = back[((r + PAD) * WP + q + PAD) * CI + i];
    }
    for (int c = 0; c < CO && !no_memory; c++)
        for (int i = 0; i < CI; i++)
            for (int k = 0; k < K * K; k++)
                dw[(c * CI + i) * K * K + k] = ((real *)(sums + (c * K + k / K) * PATCH))[k % K * CI + i];
    free(in), free(back), free(gradient), free(sums), free(taps), free(index);
    return no_memory;
}
