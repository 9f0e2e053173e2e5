// Images as a network sees them, changed at random: cut out of a padded image, mirrored, rotated, and normalised.
// Launched by views.py. Every step is that of data/transform.py, in the same order and with the same rounding.
//
// Constants: CHANNELS, ROWS and COLUMNS of a stored image; HEIGHT and WIDTH of an input; PAD; FLIP; TURN: rotated;
// FILL: what is shown where there is no image: 0 black, 1 the mean, 2 the image reflected; BITS of a draw that decide
// one random choice.

typedef unsigned char u8;
typedef unsigned long long u64;

#define FREE_ROWS (ROWS + 2 * PAD - HEIGHT)
#define FREE_COLUMNS (COLUMNS + 2 * PAD - WIDTH)
#define THREADS 128

// the `which`-th random choice of a draw, of 0 ... below - 1
__device__ inline int choice(u64 draw, int which, int below) {
  u64 z = draw + which;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return (int)(((z >> (64 - BITS)) * below) >> BITS);
}

__device__ inline int between(int at, int last) { return min(max(at, 0), last); }

struct Change {
  int top, left;
  bool mirrored;
  double cosine, sine;
};

// `most`: of 2^24 choices those by which an image is cut at random, not in the middle
__device__ inline Change change(u64 draw, double radians, int most) {
  Change c = {};
  const bool anywhere = choice(draw, 3, 1 << BITS) < most;
  c.top = (anywhere ? choice(draw, 0, FREE_ROWS + 1) : FREE_ROWS / 2) - PAD;
  c.left = (anywhere ? choice(draw, 1, FREE_COLUMNS + 1) : FREE_COLUMNS / 2) - PAD;
  c.mirrored = FLIP && choice(draw, 2, 2) == 1;
#if TURN
  const double angle = __dmul_rn(__dadd_rn(choice(draw, 4, 1 << BITS) / (double)(1 << (BITS - 1)), -1.0), radians);
  c.cosine = cos(angle);
  c.sine = sin(angle);
#endif
  return c;
}

extern "C" __global__ void __launch_bounds__(THREADS)
view(const u8* images, const long long* draws, const float* scale, const float* offset, float* out, double radians,
     int most) {
  const Change c = change((u64)draws[blockIdx.x], radians, most);
  images += (size_t)blockIdx.x * (CHANNELS * ROWS * COLUMNS);
  out += (size_t)blockIdx.x * (CHANNELS * HEIGHT * WIDTH);
  for (int pixel = threadIdx.x; pixel < HEIGHT * WIDTH; pixel += THREADS) {
    int y = pixel / WIDTH, x = pixel % WIDTH;
    bool inside = true;
#if TURN
    const double down = y - (HEIGHT - 1) / 2.0, right = x - (WIDTH - 1) / 2.0;
    const double to_y = __dadd_rn(__dmul_rn(c.cosine, down), -__dmul_rn(c.sine, right));
    const double to_x = __dadd_rn(__dmul_rn(c.sine, down), __dmul_rn(c.cosine, right));
    y = (int)rint(__dadd_rn(to_y, (HEIGHT - 1) / 2.0));
    x = (int)rint(__dadd_rn(to_x, (WIDTH - 1) / 2.0));
    inside = y >= 0 && y < HEIGHT && x >= 0 && x < WIDTH;
    y = between(y, HEIGHT - 1);
    x = between(x, WIDTH - 1);
#endif
    y += c.top;
    x += c.left;
    if (c.mirrored) x = COLUMNS - 1 - x;
#if PAD > 0 && FILL == 2
    y = ROWS - 1 - abs(ROWS - 1 - abs(y));
    x = COLUMNS - 1 - abs(COLUMNS - 1 - abs(x));
#elif PAD > 0
    inside = inside && y >= 0 && y < ROWS && x >= 0 && x < COLUMNS;
    y = between(y, ROWS - 1);
    x = between(x, COLUMNS - 1);
#endif
    for (int channel = 0; channel < CHANNELS; channel++) {
      const int byte = images[(channel * ROWS + y) * COLUMNS + x];
      const float shown = inside || FILL == 1 ? byte : 0;
      const float number = __fadd_rn(__fmul_rn(shown, scale[channel]), -offset[channel]);
      out[channel * (HEIGHT * WIDTH) + pixel] = inside || FILL != 1 ? number : 0.0f;
    }
  }
}
