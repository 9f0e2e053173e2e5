// All time steps of one LSTM layer of many networks in one launch; launched by lstm_clusters.py.
//
// A cluster of RANKS blocks has one network, and of its samples SAMPLES. A block has 32 units and keeps their weights in
// registers through all times. What its units put out, or backward what flows back to their gates, it writes at every
// time to the shared memory of all blocks of the cluster: two buffers take turns, so that one meeting a time is enough.
//
// Each sum over the layer's units is taken in parts, by threads that have the same two columns, and added up in a fixed
// order. Of [..., 4, SIZE] the four are the gates i, f, g, o. `apart` are the numbers between two networks.

#define UNITS 32
#define SIZE (RANKS * UNITS)
#define THREADS 512
#define PART (SIZE / 8)   // terms of a sum that one thread has, of two columns
#define FORWARD_PARTS 8   // of a sum of SIZE terms
#define BACKWARD_PARTS 16  // of one of 4 SIZE terms, after two halves of a warp are added

#ifndef EMULATED
typedef unsigned int u32;

__device__ inline float* shared() {
  extern __shared__ float4 memory[];
  return (float*)memory;
}

// *here = value, in the shared memory of another block of the cluster
__device__ inline void put_remote(float* here, int other, float value) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((u32)__cvta_generic_to_shared(here)), "r"(other));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}

// all threads of the cluster have come, and what they wrote is seen
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
#endif

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// sums of two columns for each sample, of the terms from `begin` on; `wide` numbers lie between two samples
__device__ inline void add_up(const float* seen, int wide, const float* w0, const float* w1, float* sum0, float* sum1) {
#pragma unroll
  for (int b = 0; b < SAMPLES; b++) sum0[b] = sum1[b] = 0;
#pragma unroll
  for (int k = 0; k < PART; k += 4)
#pragma unroll
    for (int b = 0; b < SAMPLES; b++) {
      const float4 x = *(const float4*)(seen + b * wide + k);
      // one fused multiplication and addition after the other: a sum of four products would need one operation more
      sum0[b] += w0[k] * x.x, sum1[b] += w1[k] * x.x;
      sum0[b] += w0[k + 1] * x.y, sum1[b] += w1[k + 1] * x.y;
      sum0[b] += w0[k + 2] * x.z, sum1[b] += w1[k + 2] * x.z;
      sum0[b] += w0[k + 3] * x.w, sum1[b] += w1[k + 3] * x.w;
    }
}

// pre [times, batch, 4, SIZE], w [4, SIZE, SIZE], hidden and cells [times + 1, batch, SIZE], gates [times, batch, 4, SIZE]
extern "C" __global__ void __cluster_dims__(RANKS, 1, 1) __launch_bounds__(THREADS)
    forward(const float* pre, const float* w, float* hidden, float* cells, float* gates, int times, int batch,
            int pre_apart, int w_apart, int state_apart, int gates_apart) {
  float* seen = shared();                    // [2][SAMPLES][SIZE]: what all units put out
  float* parts = seen + 2 * SAMPLES * SIZE;  // [FORWARD_PARTS][SAMPLES][4 UNITS]
  const int thread = threadIdx.x, own = blockIdx.x * UNITS, pair = thread % (2 * UNITS), part = thread / (2 * UNITS);
  const int unit = thread % UNITS, sample = thread / UNITS, place = blockIdx.z * SAMPLES + sample;
  const bool has_sample = sample < SAMPLES, live = has_sample && place < batch;
  pre += (size_t)blockIdx.y * pre_apart + own + unit;
  hidden += (size_t)blockIdx.y * state_apart + own + unit;
  cells += (size_t)blockIdx.y * state_apart + own + unit;
  gates += (size_t)blockIdx.y * gates_apart + own + unit;
  // column c of a block is gate c / UNITS of its unit c % UNITS; a thread has the columns 2 pair and 2 pair + 1
  const float* row = w + (size_t)blockIdx.y * w_apart +
                     (size_t)(2 * pair / UNITS * SIZE + own + 2 * pair % UNITS) * SIZE + part * PART;
  float w0[PART], w1[PART], sum0[SAMPLES], sum1[SAMPLES], c = 0, h = 0;
#pragma unroll
  for (int k = 0; k < PART; k++) w0[k] = row[k], w1[k] = row[SIZE + k];
  for (int k = thread; k < SAMPLES * SIZE; k += THREADS) seen[k] = 0;
  meet_cluster();
  for (int t = 0; t < times; t++) {
    float x[4] = {0, 0, 0, 0};
    const size_t at = (size_t)t * batch + place;
    if (live)
      for (int gate = 0; gate < 4; gate++) x[gate] = pre[(4 * at + gate) * SIZE];
    add_up(seen + t % 2 * SAMPLES * SIZE + part * PART, SIZE, w0, w1, sum0, sum1);
#pragma unroll
    for (int b = 0; b < SAMPLES; b++) {
      float2 two;
      two.x = sum0[b], two.y = sum1[b];
      *(float2*)(parts + (part * SAMPLES + b) * 4 * UNITS + 2 * pair) = two;
    }
    __syncthreads();
    if (live) {
      for (int gate = 0; gate < 4; gate++)
#pragma unroll
        for (int n = 0; n < FORWARD_PARTS; n++) x[gate] += parts[((n * SAMPLES + sample) * 4 + gate) * UNITS + unit];
      const float i = sigmoid(x[0]), f = sigmoid(x[1]), g = tanhf(x[2]), o = sigmoid(x[3]);
      c = f * c + i * g;
      h = o * tanhf(c);
      gates[4 * at * SIZE] = i;
      gates[(4 * at + 1) * SIZE] = f;
      gates[(4 * at + 2) * SIZE] = g;
      gates[(4 * at + 3) * SIZE] = o;
      cells[(at + batch) * SIZE] = c;
      hidden[(at + batch) * SIZE] = h;
    }
    if (has_sample)
      for (int other = 0; other < RANKS; other++)
        put_remote(seen + ((t + 1) % 2 * SAMPLES + sample) * SIZE + own + unit, other, h);
    meet_cluster();
  }
}

// above [times, batch, SIZE]: what the layer above sends back; without it dy [batch, SIZE] is for the last time's output
extern "C" __global__ void __cluster_dims__(RANKS, 1, 1) __launch_bounds__(THREADS)
    backward(const float* above, const float* dy, const float* w, const float* cells, const float* gates, float* slopes,
             int times, int batch, int above_apart, int dy_apart, int w_apart, int state_apart, int gates_apart) {
  float* sent = shared();                        // [2][SAMPLES][4 SIZE]: what flows back to all gates
  float* parts = sent + 2 * SAMPLES * 4 * SIZE;  // [BACKWARD_PARTS][SAMPLES][UNITS]
  const int thread = threadIdx.x, own = blockIdx.x * UNITS, lane = thread % 32, warp = thread / 32, pair = lane % 16;
  const int unit = thread % UNITS, sample = thread / UNITS, place = blockIdx.z * SAMPLES + sample;
  const bool has_sample = sample < SAMPLES, live = has_sample && place < batch;
  above += (size_t)blockIdx.y * above_apart + own + unit;
  dy += (size_t)blockIdx.y * dy_apart + own + unit;
  cells += (size_t)blockIdx.y * state_apart + own + unit;
  gates += (size_t)blockIdx.y * gates_apart + own + unit;
  slopes += (size_t)blockIdx.y * gates_apart + own + unit;
  const int begin = (2 * warp + lane / 16) * PART;  // of the thread's terms, of the units 2 pair and 2 pair + 1
  const float* column = w + (size_t)blockIdx.y * w_apart + (size_t)begin * SIZE + own + 2 * pair;
  float w0[PART], w1[PART], sum0[SAMPLES], sum1[SAMPLES], carried = 0, c = 0;
#pragma unroll
  for (int k = 0; k < PART; k++) w0[k] = column[k * SIZE], w1[k] = column[k * SIZE + 1];
  if (live) c = cells[((size_t)times * batch + place) * SIZE];
  meet_cluster();
  for (int n = 0; n < times; n++) {
    const int t = times - 1 - n;
    const size_t at = (size_t)t * batch + place;
    float dh = 0, before = 0, i = 0, f = 0, g = 0, o = 0;
    if (live) {
      i = gates[4 * at * SIZE], f = gates[(4 * at + 1) * SIZE];
      g = gates[(4 * at + 2) * SIZE], o = gates[(4 * at + 3) * SIZE];
      before = cells[at * SIZE];
      dh = above_apart ? above[at * SIZE] : n == 0 ? dy[(size_t)place * SIZE] : 0;
    }
    if (n > 0) {
      add_up(sent + n % 2 * SAMPLES * 4 * SIZE + begin, 4 * SIZE, w0, w1, sum0, sum1);
#pragma unroll
      for (int b = 0; b < SAMPLES; b++) {
        sum0[b] += __shfl_xor_sync(0xffffffff, sum0[b], 16);
        sum1[b] += __shfl_xor_sync(0xffffffff, sum1[b], 16);
      }
      if (lane < 16)
#pragma unroll
        for (int b = 0; b < SAMPLES; b++) {
          float2 two;
          two.x = sum0[b], two.y = sum1[b];
          *(float2*)(parts + (warp * SAMPLES + b) * UNITS + 2 * pair) = two;
        }
      __syncthreads();
      if (live)
#pragma unroll
        for (int part = 0; part < BACKWARD_PARTS; part++) dh += parts[(part * SAMPLES + sample) * UNITS + unit];
    }
    const float tc = tanhf(c), dc = dh * o * (1 - tc * tc) + carried;
    const float back[4] = {dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * tc * o * (1 - o)};
    carried = dc * f;
    c = before;
    for (int gate = 0; gate < 4; gate++) {
      if (live) slopes[(4 * at + gate) * SIZE] = back[gate];
      if (has_sample)
        for (int other = 0; other < RANKS; other++)
          put_remote(sent + (((n + 1) % 2 * SAMPLES + sample) * 4 + gate) * SIZE + own + unit, other, back[gate]);
    }
    meet_cluster();
  }
}
