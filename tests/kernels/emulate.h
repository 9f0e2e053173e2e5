// Runs CUDA kernels on a CPU, slowly: the threads of a block take turns, and the products of a warp are done by hand.
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { unsigned x, y, z; };

static Index threadIdx, blockIdx, gridDim;
static const int most_ranks = 8;  // blocks of a cluster
static float4 memory[16384];  // shared by the threads of a block, or of the first one of a cluster
static float4 more_memory[most_ranks - 1][16384];  // by those of the others
static bool overrun;  // whether a kernel wrote behind its own

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool ended;
};
static std::vector<Thread> threads;
static ucontext_t home;
static std::function<void()> body;
static int now, block_size, block_waits[most_ranks], block_round[most_ranks], cluster_waits, cluster_round;
static int warp_waits[most_ranks * 32], warp_round[most_ranks * 32];
static unsigned first_block;  // of the cluster
static float left[32][32][4], right[32][32][2];  // what the lanes of a warp bring to a product
static float brought[most_ranks * 32][32];  // and to each other

static int rank() { return now / block_size; }

static void become(int thread) {
  now = thread;
  threadIdx = {(unsigned)(now % block_size), 0, 0};
  blockIdx.x = first_block + rank();
}

static void wait() {  // another thread's turn
  int me = now;
  swapcontext(&threads[me].context, &home);
  become(me);
}

static void meet(int& waits, int& round, int of) {
  const int mine = round;
  if (++waits == of) waits = 0, round++;
  while (round == mine) wait();
}

static void __syncthreads() { meet(block_waits[rank()], block_round[rank()], block_size); }

static float* memory_of(int block) { return (float*)(block ? more_memory[block - 1] : memory); }
static float* shared() { return memory_of(rank()); }
static void meet_cluster() { meet(cluster_waits, cluster_round, (int)threads.size()); }
static void put_remote(float* here, int other, float value) {
  memory_of(other)[here - shared()] = value;
}

static float __shfl_xor_sync(unsigned, float value, int mask) {
  const int warp = now / 32, lane = now % 32;
  brought[warp][lane] = value;
  meet(warp_waits[warp], warp_round[warp], 32);
  const float other = brought[warp][lane ^ mask];
  meet(warp_waits[warp], warp_round[warp], 32);
  return other;
}

static inline float rounded(float x) { return isfinite(x) ? __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000) : x; }
static inline float cut(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000); }
template <int bytes> static void copy(void* to, const void* from) { memcpy(to, from, bytes); }
static void arrival() { __syncthreads(); }

static void mma(float* c, const float* a, float b0, float b1) {
  const int warp = now / 32, lane = now % 32, row = lane / 4, at = lane % 4;
  for (int i = 0; i < 4; i++) left[warp][lane][i] = cut(a[i]);
  right[warp][lane][0] = cut(b0), right[warp][lane][1] = cut(b1);
  meet(warp_waits[warp], warp_round[warp], 32);
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 8; k++)
      c[i] += left[warp][row * 4 + k % 4][i / 2 + k / 4 * 2] * right[warp][(2 * at + i % 2) * 4 + k % 4][k / 4];
  meet(warp_waits[warp], warp_round[warp], 32);
}

static void enter() {
  body();
  threads[now].ended = true;
}

// a grid of clusters, each of some blocks next to each other
static void launch_clusters(int ranks, int gx, int gy, int gz, int size, int bytes, std::function<void()> kernel) {
  body = kernel;
  block_size = size;
  gridDim = {(unsigned)gx, (unsigned)gy, (unsigned)gz};
  threads.resize(ranks * size);
  for (int block = 0; block < gx * gy * gz; block += ranks) {
    first_block = block % gx;
    blockIdx = {first_block, (unsigned)(block / gx % gy), (unsigned)(block / gx / gy)};
    for (int n = 0; n < ranks; n++) memset(memory_of(n), 0xff, sizeof memory);  // not a number, where a kernel reads what it did not write
    cluster_waits = 0;
    memset(block_waits, 0, sizeof block_waits);
    memset(warp_waits, 0, sizeof warp_waits);
    for (auto& thread : threads) {
      thread.stack.resize(1 << 16);
      thread.ended = false;
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = thread.stack.size();
      thread.context.uc_link = &home;
      makecontext(&thread.context, enter, 0);
    }
    bool busy = true;
    for (int turn = 0; busy; turn++) {
      busy = false;
      for (int n = 0, all = (int)threads.size(); n < all; n++) {
        const int me = turn % 2 ? all - 1 - n : n;  // in both orders: a missing barrier shows in one
        if (!threads[me].ended) {
          become(me);
          swapcontext(&home, &threads[me].context);
          busy = busy || !threads[me].ended;
        }
      }
    }
    for (int n = 0; n < ranks; n++)
      for (size_t i = bytes; i < sizeof memory; i++) overrun = overrun || ((unsigned char*)memory_of(n))[i] != 0xff;
  }
}

static void launch(int gx, int gy, int gz, int size, int bytes, std::function<void()> kernel) {
  launch_clusters(1, gx, gy, gz, size, bytes, kernel);
}
