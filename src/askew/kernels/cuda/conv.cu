// Convolution, ReLU and 2x2 max-pooling of many small networks at once; launched by small_conv.py.
//
// Four convolutions lie below a pooled pixel, and they see a patch of (K+1)^2 pixels of every channel. So the weights
// stand in four places in a patch, and with them three products are all there is to do:
//   forward   [pixels, patch]    by [patch, places and channels], of which the largest of the four places stays;
//   weights   [places and channels, pixels] by [pixels, patch], where a gradient stands in the place that was largest;
//   inputs    [pixels, places and channels] by [places and channels, patch], added up where patches overlap.
//
// A warp multiplies with tensor cores, mma m16n8k8. Of its matrices lane l has, with row = l / 4 and at = l % 4,
//   of A, 16 by 8: (row, at), (row + 8, at), (row, at + 4), (row + 8, at + 4)
//   of B, 8 by 8:  (at, row), (at + 4, row)
//   of C, 16 by 8: (row, 2 at), (row, 2 at + 1), (row + 8, 2 at), (row + 8, 2 at + 1)
// What it needs again and again, the weights, it keeps in registers. A patch is numbered in squares of 2x2, so that the
// four pixels of a square are those of a B's or an A's four lanes.
//
// Constants: CI, H, W of the input, CO channels of the output, K the side of a kernel, PAD; PART: channels of the
// input that a block of `inputs` has; HALF_IN, HALF_OUT: the input, the output, is bfloat16; SPLIT: every product is
// three of TF32, which is as good as float32. A block has `each` images of one network, `images` of them in shared
// memory at a time.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define HO ((H + 2 * PAD - K + 1) / 2)
#define WO ((W + 2 * PAD - K + 1) / 2)
#define PIXELS (HO * WO)
#define ACROSS ((K + 2) / 2)          // squares of a patch, along a side
#define SQUARES (CI * ACROSS * ACROSS)  // of a patch
#define PATCH (4 * SQUARES)
#define WARPS 4
#define THREADS (32 * WARPS)

// an image in shared memory: rows are so far apart that few lanes meet in a bank
#define WIDE (W + 2 * PAD + 1)
#define ROW (WIDE <= 16 ? 16 : (WIDE + 15) / 32 * 32 + 16)
#define PLANE ((H + 2 * PAD + 1) * ROW)
#define IMAGE (CI * PLANE)

#if HALF_IN
typedef u16 In;
#else
typedef float In;
#endif
#if HALF_OUT
typedef u16 Out;
#else
typedef float Out;
#endif

__device__ inline float value(float x) { return x; }
__device__ inline float value(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ inline void put(float* to, float x) { *to = x; }
__device__ inline void put(u16* to, float x) {  // rounded to the nearest, of two the even one
  const u32 bits = __float_as_uint(x);
  *to = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#ifndef EMULATED
__device__ inline float rounded(float x) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

__device__ inline void mma(float* c, const float* a, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

template <int bytes>
__device__ inline void copy(void* to, const void* from) {  // arrives by the next arrival()
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "n"(bytes));
}

__device__ inline void arrival() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}
#endif

// tensor cores leave out the last bits of what they read
__device__ inline float high(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

__device__ inline void multiply(float* c, const float* a, float b0, float b1) {
#if SPLIT
  float most[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    most[i] = high(a[i]);
    rest[i] = a[i] - most[i];
  }
  mma(c, rest, high(b0), high(b1));
  mma(c, most, b0 - high(b0), b1 - high(b1));
  mma(c, most, high(b0), high(b1));
#else
  mma(c, a, b0, b1);
#endif
}

// a pixel of the patch: where it lies from the patch's corner in shared memory
__device__ constexpr int spot(int q) {
  return q / (4 * ACROSS * ACROSS) * PLANE + (q / (4 * ACROSS) % ACROSS * 2 + q % 4 / 2) * ROW + q / 4 % ACROSS * 2 + q % 2;
}

// the weight of a channel that stands there
__device__ inline float tap(const float* w, int channel, int c, int q, int place) {
  const int ky = q / (4 * ACROSS) % ACROSS * 2 + q % 4 / 2 - place / 2, kx = q / 4 % ACROSS * 2 + q % 2 - place % 2;
  if (channel >= CO || c >= CI || ky < 0 || ky >= K || kx < 0 || kx >= K) return 0.0f;
  const float x = w[(channel * CI + c) * (K * K) + ky * K + kx];
  return SPLIT ? x : rounded(x);
}

// where the patch of a pooled pixel of the images in shared memory begins
__device__ inline int corner(int pixel) {
  const int place = pixel % PIXELS;
  return pixel / PIXELS * IMAGE + 2 * (place / WO) * ROW + 2 * (place % WO);
}

__device__ inline int real_images(const int* real, int batch) {
  return real ? max(0, min(batch, real[blockIdx.y])) : batch;
}

__device__ inline void clear(float* numbers, int count) {
  for (int i = threadIdx.x; i < count; i += THREADS) numbers[i] = 0.0f;
}

// images to shared memory, into the zeros around them
__device__ inline void fetch(float* to, const In* x, int count) {
  constexpr int run = HALF_IN ? 1 : W % 4 == 0 && PAD % 4 == 0 ? 4 : W % 2 == 0 && PAD % 2 == 0 ? 2 : 1;
  for (int i = threadIdx.x; i < count * CI * H * (W / run); i += THREADS) {
    const int line = i / (W / run), column = i % (W / run) * run;
    float* there = to + line / H * PLANE + (line % H + PAD) * ROW + PAD + column;
#if HALF_IN
    *there = value(x[i]);
#else
    copy<4 * run>(there, x + i * run);
#endif
  }
}

// what flows back to some images, of `mine` of `channels` channels that are `apart` in shared memory
__device__ inline void fetch_back(float* to, u8* places, const Out* g, const u8* which, int count, int mine,
                                  int channels, int apart) {
  for (int i = threadIdx.x; i < count * mine * PIXELS; i += THREADS) {
    const int plane = i / PIXELS, pixel = i % PIXELS, image = plane / mine;
    const int from = (image * CO + plane % mine) * PIXELS + pixel, there = (image * channels + plane % mine) * apart + pixel;
#if HALF_OUT
    to[there] = value(g[from]);
#else
    copy<4>(to + there, g + from);
#endif
    places[there] = which[from];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward. A pair of column tiles has four channels: each lane has the four places of one of them.

#define STEPS ((SQUARES + 1) / 2)
#define PAIRS (STEPS <= 16 ? 2 : 1)  // of a warp: what fits its registers
#define GROUPS ((CO + 4 * PAIRS - 1) / (4 * PAIRS))
#define TOGETHER (GROUPS < WARPS ? GROUPS : WARPS)  // warps of a block with different channels
#define FORWARD_TURNS (WARPS / TOGETHER)            // with different pixels

extern "C" __global__ void __launch_bounds__(THREADS, SPLIT ? 2 : 3)
forward(const In* x, const float* w, const float* bias, Out* y, u8* which, const int* real, int batch, int apart,
        int bias_apart, int each, int images) {
  extern __shared__ float4 memory[];
  float* shown = (float*)memory;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, at = lane % 4;
  const int first = blockIdx.x * each, last = min(first + each, batch), live = min(last, real_images(real, batch));
  const int group = blockIdx.z * TOGETHER + warp % TOGETHER, turn = warp / TOGETHER;
  x += (size_t)blockIdx.y * batch * (CI * H * W);
  w += (size_t)blockIdx.y * apart;
  bias += (size_t)blockIdx.y * bias_apart;
  y += (size_t)blockIdx.y * batch * (CO * PIXELS);
  which += (size_t)blockIdx.y * batch * (CO * PIXELS);
  float taps[STEPS][2 * PAIRS][2];
#pragma unroll
  for (int i = 0; i < STEPS * 4 * PAIRS; i++) {
    const int q = i / (4 * PAIRS) * 8 + i % 2 * 4 + at, tile = i / 2 % (2 * PAIRS);
    const int channel = (group * PAIRS + tile / 2) * 4 + row / 2, place = tile % 2 * 2 + row % 2;
    taps[i / (4 * PAIRS)][tile][i % 2] = q < PATCH ? tap(w, channel, q / (4 * ACROSS * ACROSS), q, place) : 0.0f;
  }
  clear(shown, images * IMAGE);
  for (int begin = first; begin < live; begin += images) {
    const int count = min(images, live - begin), pixels = count * PIXELS;
    __syncthreads();
    fetch(shown, x + (size_t)begin * (CI * H * W), count);
    arrival();
    for (int start = turn < FORWARD_TURNS ? turn * 32 : pixels; start < pixels; start += 32 * FORWARD_TURNS) {
      float sums[2][2 * PAIRS][4] = {};
      const float* patch[4];
#pragma unroll
      for (int r = 0; r < 4; r++)
        patch[r] = shown + corner(min(start + 8 * r + row, pixels - 1)) + at / 2 * ROW + at % 2;
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        const int near = spot(step * 8), far = step * 8 + 4 < PATCH ? spot(step * 8 + 4) : 0;
        const float a[2][4] = {{patch[0][near], patch[1][near], patch[0][far], patch[1][far]},
                               {patch[2][near], patch[3][near], patch[2][far], patch[3][far]}};
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; i++) multiply(sums[i % 2][i / 2], a[i % 2], taps[step][i / 2][0], taps[step][i / 2][1]);
      }
#pragma unroll
      for (int i = 0; i < 4 * PAIRS; i++) {
        const int r = i % 4, pair = i / 4, pixel = start + 8 * r + row, channel = (group * PAIRS + pair) * 4 + at;
        if (pixel >= pixels || channel >= CO) continue;
        const float* four[2] = {&sums[r / 2][2 * pair][r % 2 * 2], &sums[r / 2][2 * pair + 1][r % 2 * 2]};
        float best = four[0][0];
        int arg = 0;
#pragma unroll
        for (int place = 1; place < 4; place++) {
          const float other = four[place / 2][place % 2];
          arg = other > best ? place : arg;
          best = other > best || other != other ? other : best;
        }
        best += bias[channel];
        const size_t to = ((size_t)(begin + pixel / PIXELS) * CO + channel) * PIXELS + pixel % PIXELS;
        which[to] = best > 0 ? arg : 4;  // 4: the ReLU is off, nothing flows back
        put(y + to, best <= 0 ? 0.0f : best);
      }
    }
  }
  if (blockIdx.z > 0) return;
  for (int i = threadIdx.x; i < (last - max(first, live)) * CO * PIXELS; i += THREADS) {
    const size_t to = (size_t)max(first, live) * CO * PIXELS + i;
    put(y + to, 0.0f);
    which[to] = 4;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients of the weights. Rows are eight channels in the four places, columns the pixels of the patch and a one that
// the bias sees. Warps share the columns, and where that leaves some over, the pooled pixels. Each has sums of its own,
// which `fold` adds in a fixed order.

#define COLUMNS ((PATCH + 8) / 8)  // tiles of eight
#define MOST 7                     // of them, that a warp can have
#define SHARES ((COLUMNS + MOST - 1) / MOST)
#define TILES ((COLUMNS + SHARES - 1) / SHARES)
#define ABREAST (SHARES < WARPS ? SHARES : WARPS)  // warps of a block with different columns
#define TURNS (WARPS / ABREAST)                    // with different pixels
#define CHANNEL_TILES ((CO + 7) / 8)
#define SUMS (CHANNEL_TILES * 32 * COLUMNS * 8)  // of one network
#define BACK ((PIXELS + 27) / 32 * 32 + 4)       // channels are that far apart, in banks of their own

extern "C" __global__ void __launch_bounds__(THREADS, 4)
weights(const In* x, const Out* g, const u8* which, float* parts, const int* real, int batch, int each, int images) {
  extern __shared__ float4 memory[];
  float *shown = (float*)memory, *back = shown + images * IMAGE;
  u8* places = (u8*)(back + images * 8 * BACK);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, at = lane % 4;
  const int first = blockIdx.x * each, live = min(min(first + each, batch), real_images(real, batch));
  const int tile = blockIdx.z % CHANNEL_TILES, turn = warp / ABREAST, steps = (PIXELS + 7) / 8;
  const int share = blockIdx.z / CHANNEL_TILES * ABREAST + warp % ABREAST;
  const bool works = turn < TURNS && share < SHARES;
  x += (size_t)blockIdx.y * batch * (CI * H * W);
  g += ((size_t)blockIdx.y * batch * CO + tile * 8) * PIXELS;
  which += ((size_t)blockIdx.y * batch * CO + tile * 8) * PIXELS;
  parts += ((size_t)(blockIdx.y * gridDim.x + blockIdx.x) * TURNS + turn) * SUMS + tile * 32 * COLUMNS * 8;
  float sums[2][TILES][4] = {};
  int spots[TILES];
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    const int q = (share * TILES + j) * 8 + row;
    spots[j] = q < PATCH ? spot(q) : q == PATCH ? -1 : -2;  // -1: the one, -2: nothing
  }
  clear(shown, images * (IMAGE + 8 * BACK));
  for (int begin = first; begin < live; begin += images) {
    const int count = min(images, live - begin);
    __syncthreads();
    fetch(shown, x + (size_t)begin * (CI * H * W), count);
    fetch_back(back, places, g + (size_t)begin * CO * PIXELS, which + (size_t)begin * CO * PIXELS, count,
               min(8, CO - tile * 8), 8, BACK);
    arrival();
    for (int step = works ? turn : count * steps; step < count * steps; step += TURNS) {
      const int image = step / steps, pixel = step % steps * 8 + at, from = (image * 8 + row) * BACK + pixel;
      const float grad[2] = {pixel < PIXELS ? back[from] : 0.0f, pixel + 4 < PIXELS ? back[from + 4] : 0.0f};
      const int arg[2] = {pixel < PIXELS ? places[from] : 4, pixel + 4 < PIXELS ? places[from + 4] : 4};
      const float* patch[2] = {shown + corner(image * PIXELS + min(pixel, PIXELS - 1)),
                               shown + corner(image * PIXELS + min(pixel + 4, PIXELS - 1))};
      float a[2][4];
#pragma unroll
      for (int i = 0; i < 8; i++) a[i / 4][i % 4] = arg[i % 4 / 2] == i / 4 * 2 + i % 2 ? grad[i % 4 / 2] : 0.0f;
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const float other = spots[j] == -1 ? 1.0f : 0.0f;
        const float b0 = spots[j] >= 0 ? patch[0][spots[j]] : other, b1 = spots[j] >= 0 ? patch[1][spots[j]] : other;
        multiply(sums[0][j], a[0], b0, b1);
        multiply(sums[1][j], a[1], b0, b1);
      }
    }
  }
  if (!works) return;
#pragma unroll
  for (int j = 0; j < TILES; j++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int place = i / 2, column = (share * TILES + j) * 8 + 2 * at + i % 2;
      if (column < COLUMNS * 8) parts[(place * 8 + row) * (COLUMNS * 8) + column] = sums[i / 4][j][i % 4];
    }
}

// Gradients of weights and biases of a network, from all sums
extern "C" __global__ void __launch_bounds__(THREADS) fold(const float* parts, float* out, int count) {
  const int i = blockIdx.x * THREADS + threadIdx.x, all = CO * CI * K * K;
  if (i >= all + CO) return;
  const int channel = i < all ? i / (CI * K * K) : i - all, c = i / (K * K) % CI, ky = i / K % K, kx = i % K;
  const float* from = parts + (size_t)blockIdx.y * count * SUMS + (channel / 8 * 32 + channel % 8) * (COLUMNS * 8);
  float sum = 0.0f;
  for (int part = 0; part < count; part++)
#pragma unroll
    for (int place = 0; place < 4; place++) {
      const int y = ky + place / 2, x = kx + place % 2;
      const int q = ((c * ACROSS + y / 2) * ACROSS + x / 2) * 4 + y % 2 * 2 + x % 2;
      sum += from[(size_t)part * SUMS + place * 8 * (COLUMNS * 8) + (i < all ? q : PATCH)];
    }
  out[(size_t)blockIdx.y * (all + CO) + i] = sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients of the input. Warps share the columns of a patch; the patches meet in shared memory.

#define INNER (4 * ACROSS * ACROSS)  // of a patch, for one channel
#define PATCH_TILES ((PART * INNER + 7) / 8)
#define OWN ((PATCH_TILES + WARPS - 1) / WARPS)  // of a warp
#define PATCH_ROW ((PATCH_TILES * 8 + 23) / 32 * 32 + 8)
#define INPUT_BACK ((PIXELS + 23) / 32 * 32 + 8)

extern "C" __global__ void __launch_bounds__(THREADS, SPLIT ? 2 : 3)
inputs(const Out* g, const u8* which, const float* w, In* dx, const int* real, int batch, int apart, int each,
       int images) {
  extern __shared__ float4 memory[];
  float *patches = (float*)memory, *back = patches + images * PIXELS * PATCH_ROW;
  u8* places = (u8*)(back + images * CHANNEL_TILES * 8 * INPUT_BACK);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, at = lane % 4;
  const int first = blockIdx.x * each, last = min(first + each, batch), live = min(last, real_images(real, batch));
  const int c0 = blockIdx.z * PART, part = min(PART, CI - c0);
  g += (size_t)blockIdx.y * batch * (CO * PIXELS);
  which += (size_t)blockIdx.y * batch * (CO * PIXELS);
  w += (size_t)blockIdx.y * apart;
  dx += (size_t)blockIdx.y * batch * (CI * H * W);
  float taps[OWN][4 * CHANNEL_TILES][2];
#pragma unroll
  for (int i = 0; i < OWN * 8 * CHANNEL_TILES; i++) {
    const int own = i / (8 * CHANNEL_TILES), step = i / 2 % (4 * CHANNEL_TILES), q = (warp * OWN + own) * 8 + row;
    const int channel = step % CHANNEL_TILES * 8 + i % 2 * 4 + at, c = c0 + q / INNER;
    taps[own][step][i % 2] = q < PART * INNER ? tap(w, channel, c, q, step / CHANNEL_TILES) : 0.0f;
  }
  clear(back, images * CHANNEL_TILES * 8 * INPUT_BACK);
  for (int begin = first; begin < live; begin += images) {
    const int count = min(images, live - begin), pixels = count * PIXELS;
    __syncthreads();
    fetch_back(back, places, g + (size_t)begin * CO * PIXELS, which + (size_t)begin * CO * PIXELS, count, CO,
               CHANNEL_TILES * 8, INPUT_BACK);
    arrival();
    for (int start = 0; start < pixels; start += 16) {
      float a[4 * CHANNEL_TILES][4], sums[OWN][4] = {};
#pragma unroll
      for (int i = 0; i < 4 * CHANNEL_TILES; i++) {
        const int pixel = min(start + i % 2 * 8 + row, pixels - 1), channel = i / 4 * 8 + i / 2 % 2 * 4 + at;
        const int from = (pixel / PIXELS * CHANNEL_TILES * 8 + channel) * INPUT_BACK + pixel % PIXELS;
        const float grad = back[from];
        const int arg = places[from];
#pragma unroll
        for (int place = 0; place < 4; place++) a[place * CHANNEL_TILES + i / 4][i % 4] = arg == place ? grad : 0.0f;
      }
#pragma unroll
      for (int step = 0; step < 4 * CHANNEL_TILES; step++)
#pragma unroll
        for (int own = 0; own < OWN; own++) multiply(sums[own], a[step], taps[own][step][0], taps[own][step][1]);
#pragma unroll
      for (int own = 0; own < OWN; own++) {
        float* to = patches + (start + row) * PATCH_ROW + (warp * OWN + own) * 8 + 2 * at;
        const float2 upper = {sums[own][0], sums[own][1]}, lower = {sums[own][2], sums[own][3]};
        if (warp * OWN + own >= PATCH_TILES) continue;
        if (start + row < pixels) *(float2*)to = upper;
        if (start + row + 8 < pixels) *(float2*)(to + 8 * PATCH_ROW) = lower;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count * part * H * W; i += THREADS) {
      const int image = i / (part * H * W), c = i / (H * W) % part, pixel = i % (H * W);
      const int y = pixel / W + PAD, x = pixel % W + PAD;
      const float* from = patches + image * PIXELS * PATCH_ROW + c * INNER + y % 2 * 2 + x % 2;
      float sum = 0.0f;
#pragma unroll
      for (int near = 0; near < ACROSS * ACROSS; near++) {
        const int py = y / 2 - near / ACROSS, px = x / 2 - near % ACROSS;
        if (py >= 0 && py < HO && px >= 0 && px < WO) sum += from[(py * WO + px) * PATCH_ROW + near * 4];
      }
      put(dx + ((size_t)(begin + image) * CI + c0 + c) * (H * W) + pixel, sum);
    }
  }
  for (int i = threadIdx.x; i < (last - max(first, live)) * part * (H * W); i += THREADS) {
    const int image = max(first, live) + i / (part * H * W);
    put(dx + ((size_t)image * CI + c0) * (H * W) + i % (part * H * W), 0.0f);
  }
}
