// The CPU's kernels of a decode step in C++: what each computes is said beside its name in engine/kernels.py; and the
// backward passes of some of them (engine/gradients.py).
//
// Numbers are float32 or bfloat16 (`half`), sums always float32. Rows are shared between OpenMP's threads where they
// are worth it. Sums go by lanes of 16, so a result does not depend on the other rows of a batch, nor on the number
// of threads; products of more than LANE_ROWS rows of floats may go by tiles, which do not depend on them either.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__) && !defined(__clang__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES
#endif

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2), may_alias));
constexpr int64_t WORTH = 1 << 15;  // elements of a call that pay for waking threads
constexpr int64_t LANE_ROWS = 8;    // of floats: with so few, lanes read a weight as fast as memory gives it

// Rows of x that are multiplied by four rows of a weight at a time, and numbers of each: the sums stay in registers, of
// which AVX2 has 16 of 8 numbers. LANES: queries or keys of attention whose sums stay there, too.
#ifdef __AVX512F__
constexpr int64_t TOGETHER = 6, RUN = 16, LANES = 16;
#else
constexpr int64_t TOGETHER = 3, RUN = 8, LANES = 4;
#endif
constexpr int64_t RUNS = 16 / RUN;
typedef float Run __attribute__((vector_size(4 * RUN), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t RunWords __attribute__((vector_size(4 * RUN)));
typedef uint16_t RunShorts __attribute__((vector_size(2 * RUN), aligned(2), may_alias));

// bfloat16: the upper half of a float, rounded to the nearest, and to even between two.
struct Half {
  uint16_t bits;
  Half() = default;
  Half(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = x == x ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : 0x7fc0;
  }
  operator float() const {
    uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
};

static inline Lanes at(const float *x) { return *(const Lanes *)x; }

static inline Lanes at(const Half *x) {
  Words words = __builtin_convertvector(*(const Shorts *)x, Words) << 16;
  return (Lanes)words;
}

static inline Run run_at(const float *x) { return *(const Run *)x; }

static inline Run run_at(const Half *x) {
  RunWords words = __builtin_convertvector(*(const RunShorts *)x, RunWords) << 16;
  return (Run)words;
}

template <typename T>
static inline void put(T *to, Lanes x) {
  for (int i = 0; i < 16; i++) to[i] = x[i];
}

static inline float total(Lanes x) {
  float sum = 0;
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) x[i] += x[i + step];
  return sum + x[0];
}

#if defined(__AVX512F__) && !defined(__clang__)
// x[i] = the sums of lanes that stand W apart, of x[2 i] and then of x[2 i + 1], for `count` numbers i.
template <int W>
static inline void halve(Lanes *x, int count) {
  constexpr auto at = [](int k) { return (k & 8) * 2 + (k & 7) / W * 2 * W + (k & 7) % W; };
  const Words near = {at(0), at(1), at(2),  at(3),  at(4),  at(5),  at(6),  at(7),
                      at(8), at(9), at(10), at(11), at(12), at(13), at(14), at(15)};
  for (int i = 0; i < count; i++) {
    Lanes a = x[2 * i], b = x[2 * i + 1];
    x[i] = __builtin_shuffle(a, b, near) + __builtin_shuffle(a, b, near + W);
  }
}

// total() of each of 16, by the same additions: lanes are crossed once for all of them.
static inline Lanes totals(Lanes *x) {
  halve<8>(x, 8), halve<4>(x, 4), halve<2>(x, 2), halve<1>(x, 1);
  return x[0];
}
#else
// total() of each of 16, or of shorter ones.
template <typename V>
static inline Lanes totals(const V *x) {
  Lanes sums;
  for (int i = 0; i < 16; i += 4) {
    Quad quads[4] = {};
    for (int j = 0; j < 4; j++)
      for (int k = 0; k < (int)sizeof(V) / 4; k += 4) quads[j] += *(const Quad *)((const float *)(x + i + j) + k);
    Quad sum = {};
    for (int k = 0; k < 4; k++) sum += Quad{quads[0][k], quads[1][k], quads[2][k], quads[3][k]};
    for (int j = 0; j < 4; j++) sums[i + j] = sum[j];
  }
  return sums;
}
#endif

// exp: 2^n * e^r with r = x - n * ln 2 in two parts, e^r by its series; 0 below e^-87.
static inline float exponential(float x) {
  float y = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
  float n = (y * 1.44269504f + 12582912.f) - 12582912.f;  // rounds: floats near 1.5 * 2^23 are whole numbers
  float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  float e = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f + r / 5040))))));
  int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return x < -87.f ? 0.f : e * power;
}

template <typename T>
static float inverse_rms(const T *x, int64_t size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; i++) sum += (float)x[i] * (float)x[i];
  return 1 / std::sqrt(sum / size + eps);
}

template <typename T>
static void add_rms_norm_of(const T *x, const T *residual, const T *weight, T *normed, T *summed, int64_t n,
                            int64_t size, float eps) {
#pragma omp parallel for if (n > 1 && n * size > WORTH)
  for (int64_t row = 0; row < n; row++) {
    const T *sum = x + row * size;
    if (residual) {
      T *to = summed + row * size;
      for (int64_t i = 0; i < size; i++) to[i] = (float)sum[i] + (float)residual[row * size + i];
      sum = to;  // the norm sees what later layers will see
    }
    float scale = inverse_rms(sum, size, eps);
    for (int64_t i = 0; i < size; i++) normed[row * size + i] = (float)sum[i] * scale * (float)weight[i];
  }
}

template <typename T>
static void silu_mul_of(const T *gate_up, T *out, int64_t n, int64_t blocks, int64_t width) {
#pragma omp parallel for if (n * blocks > 1 && n * blocks * width > WORTH / 4)
  for (int64_t row = 0; row < n * blocks; row++) {
    const T *gate = gate_up + 2 * row * width, *up = gate + width;
    T *to = out + row * width;
    for (int64_t i = 0; i < width; i++) {
      T silu = (float)gate[i] / (1 + exponential(-(float)gate[i]));  // rounded where torch rounds
      to[i] = (float)silu * (float)up[i];
    }
  }
}

// The gradient of gate and up, in their layout: of silu(gate) * up it is (gradient * up * silu'(gate), gradient * silu).
template <typename T>
static void silu_mul_backward_of(const T *gradient, const T *gate_up, T *out, int64_t n, int64_t blocks,
                                 int64_t width) {
#pragma omp parallel for if (n * blocks > 1 && n * blocks * width > WORTH / 4)
  for (int64_t row = 0; row < n * blocks; row++) {
    const T *gate = gate_up + 2 * row * width, *up = gate + width, *from = gradient + row * width;
    T *to = out + 2 * row * width;
    for (int64_t i = 0; i < width; i++) {
      float x = gate[i], sigmoid = 1 / (1 + exponential(-x)), each = from[i];
      to[i] = each * (float)up[i] * (sigmoid * (1 + x * (1 - sigmoid)));
      to[width + i] = each * (x * sigmoid);
    }
  }
}

// The gradient of x, and of the weight by parts of the rows, which the caller adds up: the same sums for any threads.
template <typename T>
static void rms_norm_backward_of(const T *gradient, const T *x, const T *weight, T *out, float *of_weight, int64_t n,
                                 int64_t size, int64_t parts, float eps) {
#pragma omp parallel for if (n * size > WORTH)
  for (int64_t part = 0; part < parts; part++) {
    float *sums = of_weight + part * size;
    for (int64_t i = 0; i < size; i++) sums[i] = 0;
    for (int64_t row = part * n / parts; row < (part + 1) * n / parts; row++) {
      const T *from = gradient + row * size, *own = x + row * size;
      float scale = inverse_rms(own, size, eps), along = 0;
#pragma omp simd reduction(+ : along)
      for (int64_t i = 0; i < size; i++) along += (float)from[i] * (float)weight[i] * (float)own[i];
      float share = along * scale * scale / size;
      for (int64_t i = 0; i < size; i++) {
        out[row * size + i] = scale * ((float)from[i] * (float)weight[i] - (float)own[i] * share);
        sums[i] += (float)from[i] * (float)own[i] * scale;
      }
    }
  }
}

// Splits rows of heads [row, heads, groups + 2, size] into q, k and v, of which q and k are turned; cos, sin [row, size].
// Backward the gradient of the rows, from those of q, k and v.
extern "C" void rope(float *rows, const float *cos, const float *sin, float *q, float *k, float *v, int64_t n,
                     int64_t heads, int64_t groups, int64_t size, bool is_backward) {
  const int64_t half = size / 2;
#pragma omp parallel for if (n * heads * (groups + 2) * size > WORTH)
  for (int64_t row = 0; row < n; row++) {
    const float *c = cos + row * size, *s = sin + row * size;
    for (int64_t head = row * heads; head < (row + 1) * heads; head++)
      for (int64_t g = 0; g < groups + 2; g++) {
        float *whole = rows + (head * (groups + 2) + g) * size;
        float *part = g < groups ? q + (head * groups + g) * size : (g == groups ? k : v) + head * size;
        if (g > groups) {
          memcpy(is_backward ? whole : part, is_backward ? part : whole, size * 4);
          continue;
        }
        for (int64_t i = 0; i < half; i++) {
          const int64_t j = i + half;
          if (is_backward) {
            const float x = part[i], y = part[j];
            whole[i] = x * c[i] + y * s[j], whole[j] = y * c[j] + x * s[i];
          } else {
            const float x = whole[i], y = whole[j];
            part[i] = x * c[i] + y * s[i], part[j] = y * c[j] + x * s[j];
          }
        }
      }
  }
}

// The places of a key head's keys and values, in pages of a row.
struct Pages {
  void *keys, *values;
  int64_t of_page, of_head, size;  // strides in numbers; tokens of a page
};

template <typename T>
static void turn(const T *from, T *to, const T *cos, const T *sin, const T *norm, int64_t half, float eps) {
  float scale = norm ? inverse_rms(from, 2 * half, eps) : 1;
  for (int64_t i = 0; i < half; i++) {
    float x = from[i], y = from[i + half], c = cos[i], s = sin[i];
    if (norm) x = T(x * (scale * (float)norm[i])), y = T(y * (scale * (float)norm[i + half]));
    to[i] = x * c - y * s, to[i + half] = y * c + x * s;
  }
}

template <typename T>
static void rope_and_write_of(const T *qkv, const T *cos, const T *sin, const int64_t *positions, const int32_t *table,
                              int64_t row_of_table, const Pages *pages, const T *q_norm, const T *k_norm, T *q,
                              int64_t n, int64_t heads, int64_t groups, int64_t size, float eps) {
  int64_t half = size / 2;
#pragma omp parallel for if (n > 1 && n * heads * (groups + 2) * size > WORTH)
  for (int64_t row = 0; row < n; row++) {
    int64_t position = positions[row];
    if (position < 0) {
      memset((void *)(q + row * heads * groups * size), 0, heads * groups * size * sizeof(T));
      continue;
    }
    const T *c = cos + position * half, *s = sin + position * half;
    int64_t page = table[row * row_of_table + position / pages->size];
    for (int64_t head = 0; head < heads; head++) {
      const T *from = qkv + (row * heads + head) * (groups + 2) * size;
      T *to = q + (row * heads + head) * groups * size;
      for (int64_t g = 0; g < groups; g++) turn(from + g * size, to + g * size, c, s, q_norm, half, eps);
      int64_t place = page * pages->of_page + head * pages->of_head + position % pages->size * size;
      turn(from + groups * size, (T *)pages->keys + place, c, s, k_norm, half, eps);
      memcpy((T *)pages->values + place, from + (groups + 1) * size, size * sizeof(T));
    }
  }
}

// Attention of `COUNT` query heads that share one key head, to the tokens begin .. end of a row. scores [COUNT, tokens]
template <typename T, int SIZE, int COUNT>
static void attend(const T *queries, const Pages &pages, int64_t head, const int32_t *table, int64_t begin,
                   int64_t end, float *scores, T *out) {
  constexpr int PARTS = SIZE / 16, ABREAST = RUNS == 1 ? PARTS : COUNT > 2 || SIZE % 32 ? 2 : 4;  // runs of a value
  float q[COUNT * SIZE];
  for (int i = 0; i < COUNT * SIZE; i++) q[i] = queries[i];
  const float scale = 1 / std::sqrt((float)SIZE);
  int64_t length = end - begin, count;
  for (int64_t start = begin; start < end; start += count) {
    int64_t place = start % pages.size, page = table[start / pages.size];
    const T *keys = (const T *)pages.keys + page * pages.of_page + head * pages.of_head + place * SIZE;
    count = end - start < pages.size - place ? end - start : pages.size - place;
    int64_t t = 0;
    for (; t + 16 <= count; t += 16)
      for (int g = 0; g < COUNT; g++) {
        Lanes sums[16];
        for (int first = 0; first < 16; first += LANES) {
          Run own[LANES][RUNS] = {};
          for (int p = 0; p < PARTS; p++)
            for (int r = 0; r < RUNS; r++) {
              Run query = run_at(q + g * SIZE + 16 * p + RUN * r);
              for (int k = 0; k < LANES; k++)
                own[k][r] += run_at(keys + (t + first + k) * SIZE + 16 * p + RUN * r) * query;
            }
          memcpy(sums + first, own, sizeof own);
        }
        put(scores + g * length + start - begin + t, totals(sums));
      }
    for (; t < count; t++)
      for (int g = 0; g < COUNT; g++) {
        Lanes sum = {};
        for (int p = 0; p < PARTS; p++) sum += at(keys + t * SIZE + 16 * p) * at(q + g * SIZE + 16 * p);
        scores[g * length + start - begin + t] = total(sum);
      }
  }
  float sums[COUNT];
  for (int g = 0; g < COUNT; g++) {
    float *row = scores + g * length, peak = row[0], sum = 0;
#pragma omp simd reduction(max : peak)
    for (int64_t t = 0; t < length; t++) peak = row[t] > peak ? row[t] : peak;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < length; t++) sum += row[t] = exponential((row[t] - peak) * scale);
    sums[g] = sum;
  }
  Run result[SIZE / RUN][COUNT] = {};
  for (int64_t start = begin; start < end; start += count) {
    int64_t place = start % pages.size, page = table[start / pages.size];
    const T *values = (const T *)pages.values + page * pages.of_page + head * pages.of_head + place * SIZE;
    count = end - start < pages.size - place ? end - start : pages.size - place;
    auto add = [&](auto &own, int first) {
      for (int64_t t = 0; t < count; t++)
        for (int p = 0; p < ABREAST; p++) {
          Run numbers = run_at(values + t * SIZE + RUN * (first + p));
          for (int g = 0; g < COUNT; g++) own[p][g] += scores[g * length + start - begin + t] * numbers;
        }
    };
    if (ABREAST * RUN == SIZE) {  // nothing to copy
      add(result, 0);
      continue;
    }
    for (int first = 0; first < SIZE / RUN; first += ABREAST) {  // as many as stay in registers
      Run own[ABREAST][COUNT];
      memcpy(own, result + first, sizeof own);
      add(own, first);
      memcpy(result + first, own, sizeof own);
    }
  }
  for (int g = 0; g < COUNT; g++)
    for (int p = 0; p < PARTS; p++) {
      Lanes whole;
      for (int r = 0; r < RUNS; r++) memcpy((float *)&whole + RUN * r, &result[p * RUNS + r][g], sizeof(Run));
      put(out + g * SIZE + 16 * p, whole / sums[g]);
    }
}

// to[t] = the sum of from[t][i] * columns[i] over i < SIZE, for `count` rows t; `adds`: to what is there.
template <typename T, int SIZE>
static void product(const T *from, int64_t row_of_from, const float (*columns)[16], float *to, int64_t row_of_to,
                    int64_t count, bool adds) {
  int64_t t = 0;
  for (; t + 4 <= count; t += 4) {  // rows that read a column once, and sums that do not wait for each other
    Run sums[4][RUNS] = {};
    for (int j = 0; adds && j < 4; j++)
      for (int r = 0; r < RUNS; r++) sums[j][r] = run_at(to + (t + j) * row_of_to + RUN * r);
    for (int i = 0; i < SIZE; i++)
      for (int r = 0; r < RUNS; r++) {
        Run column = run_at(columns[i] + RUN * r);
        for (int j = 0; j < 4; j++) sums[j][r] += (float)from[(t + j) * row_of_from + i] * column;
      }
    for (int j = 0; j < 4; j++)
      for (int r = 0; r < RUNS; r++) *(Run *)(to + (t + j) * row_of_to + RUN * r) = sums[j][r];
  }
  for (; t < count; t++) {
    Lanes sum = {};
    if (adds) sum = at(to + t * row_of_to);
    for (int i = 0; i < SIZE; i++) sum += (float)from[t * row_of_from + i] * at(columns[i]);
    *(Lanes *)(to + t * row_of_to) = sum;
  }
}

// sums[lane] += the sum of weights[t][lane] * from[t] over `count` rows t of 16 numbers.
template <typename T>
static void weigh(const float *weights, const T *from, int64_t row_of_from, int64_t count, Lanes *sums) {
  for (int first = 0; first < 16; first += LANES) {
    float *own = (float *)(sums + first);
    Run result[LANES][RUNS];
    for (int lane = 0; lane < LANES; lane++)
      for (int r = 0; r < RUNS; r++) result[lane][r] = run_at(own + 16 * lane + RUN * r);
    for (int64_t t = 0; t < count; t++)
      for (int r = 0; r < RUNS; r++) {
        Run numbers = run_at(from + t * row_of_from + RUN * r);
        for (int lane = 0; lane < LANES; lane++) result[lane][r] += weights[16 * t + first + lane] * numbers;
      }
    for (int lane = 0; lane < LANES; lane++)
      for (int r = 0; r < RUNS; r++) *(Run *)(own + 16 * lane + RUN * r) = result[lane][r];
  }
}

// The same for `count` heads of tokens that stand one behind another in a row, 16 at a time, each in a lane of its own: a
// key is read once for all of them, and no sum goes across lanes. lengths [tokens]; their queries are `row_of_q` apart.
template <typename T, int SIZE>
static void attend_together(const T *q, const Pages &pages, int64_t head, const int32_t *table,
                            const int32_t *lengths, int64_t count, int64_t groups, int64_t row_of_q, int64_t window,
                            std::vector<float> &memory, T *out) {
  const float scale = 1 / std::sqrt((float)SIZE);
  for (int64_t first = 0; first < count; first += 16) {
    int64_t lanes = count - first < 16 ? count - first : 16, places[16];
    int64_t begin = lengths[first / groups] - window, end = lengths[(first + lanes - 1) / groups];
    if (!window || begin < 0) begin = 0;
    if ((int64_t)memory.size() < 16 * (end - begin)) memory.resize(32 * (end - begin));
    float queries[SIZE][16], sums[16] = {}, peaks[16], *scores = memory.data();
    int32_t begins[16], ends[16];
    for (int lane = 0; lane < 16; lane++) {
      int64_t query = first + (lane < lanes ? lane : 0);
      places[lane] = query / groups * row_of_q + query % groups * SIZE, peaks[lane] = -INFINITY;
      ends[lane] = lengths[query / groups], begins[lane] = window ? ends[lane] - window : 0;
      for (int i = 0; i < SIZE; i++) queries[i][lane] = (float)q[places[lane] + i] * scale;
    }
    auto by_page = [&](const void *numbers, auto each) {
      for (int64_t t = begin, some; t < end; t += some) {
        int64_t place = t % pages.size, page = table[t / pages.size];
        some = end - t < pages.size - place ? end - t : pages.size - place;
        each((const T *)numbers + page * pages.of_page + head * pages.of_head + place * SIZE, t - begin, some);
      }
    };
    by_page(pages.keys, [&](const T *keys, int64_t t, int64_t some) {
      product<T, SIZE>(keys, SIZE, queries, scores + 16 * t, 16, some, false);
    });
    for (int64_t t = window ? begin : ends[0]; t < end; t++)  // those before are keys of all lanes
      for (int lane = 0; lane < 16; lane++)
        if (t < begins[lane] || t >= ends[lane]) scores[16 * (t - begin) + lane] = -INFINITY;
    for (float *row = scores; row < scores + 16 * (end - begin); row += 16)
      for (int lane = 0; lane < 16; lane++) peaks[lane] = row[lane] > peaks[lane] ? row[lane] : peaks[lane];
    for (float *row = scores; row < scores + 16 * (end - begin); row += 16)
      for (int lane = 0; lane < 16; lane++) sums[lane] += row[lane] = exponential(row[lane] - peaks[lane]);
    for (int64_t part = 0; part < SIZE; part += 16) {
      Lanes result[16] = {};
      by_page(pages.values, [&](const T *values, int64_t t, int64_t some) {
        weigh(scores + 16 * t, values + part, SIZE, some, result);
      });
      for (int lane = 0; lane < lanes; lane++) put(out + places[lane] + part, result[lane] / sums[lane]);
    }
  }
}

// Whether the next token stands behind this one in the same row, so that it sees all that this one sees.
static bool goes_on(const int32_t *table, int64_t row_of_table, const int32_t *length, int64_t page_size) {
  int64_t pages = (length[0] + page_size - 1) / page_size;
  return pages && length[1] == length[0] + 1 && !memcmp(table, table + row_of_table, pages * sizeof(int32_t));
}

template <typename T, int SIZE>
static void attend_all(const T *q, const Pages &pages, const int32_t *table, int64_t row_of_table,
                       const int32_t *lengths, T *out, int64_t n, int64_t heads, int64_t groups, int64_t window) {
  static thread_local std::vector<int64_t> rows;  // where each begins: one token, or one and its draft
  rows.clear();
  int64_t work = 0, row_of_q = heads * groups * SIZE;
  for (int64_t i = 0; i < n; i++) {
    work += lengths[i] * row_of_q;
    if (!i || !goes_on(table + (i - 1) * row_of_table, row_of_table, lengths + i - 1, pages.size)) rows.push_back(i);
  }
  rows.push_back(n);
  const int64_t *starts = rows.data(), tasks = (rows.size() - 1) * heads;
#pragma omp parallel for schedule(dynamic) if (tasks > 1 && work > WORTH)
  for (int64_t task = 0; task < tasks; task++) {
    static thread_local std::vector<float> scores;
    int64_t row = starts[task / heads], next = starts[task / heads + 1], head = task % heads, end = lengths[row];
    int64_t begin = window && end > window ? end - window : 0, place = row * row_of_q + head * groups * SIZE;
    const int32_t *own = table + (next - 1) * row_of_table;
    if (next - row > 1) {
      attend_together<T, SIZE>(q + place, pages, head, own, lengths + row, (next - row) * groups, groups, row_of_q,
                               window, scores, out + place);
      continue;
    }
    if ((int64_t)scores.size() < 4 * (end - begin)) scores.resize(8 * (end - begin));
    for (int64_t g = 0; g < groups; g += 4) {
      const T *from = q + place + g * SIZE;
      T *to = out + place + g * SIZE;
      float *s = scores.data();
      int64_t count = groups - g < 4 ? groups - g : 4;
      if (!end) {
        memset((void *)to, 0, count * SIZE * sizeof(T));
        continue;
      }
      auto some = count == 4   ? attend<T, SIZE, 4>
                  : count == 3 ? attend<T, SIZE, 3>
                  : count == 2 ? attend<T, SIZE, 2>
                               : attend<T, SIZE, 1>;
      some(from, pages, head, own, begin, end, s, to);
    }
  }
}

template <typename T>
static void paged_decode_of(const T *q, const Pages *pages, const int32_t *table, int64_t row_of_table,
                            const int32_t *lengths, T *out, int64_t n, int64_t heads, int64_t groups, int64_t size,
                            int64_t window) {
  auto all = size == 16   ? attend_all<T, 16>
             : size == 32 ? attend_all<T, 32>
             : size == 64 ? attend_all<T, 64>
             : size == 80 ? attend_all<T, 80>
             : size == 96 ? attend_all<T, 96>
                          : attend_all<T, 128>;
  all(q, *pages, table, row_of_table, lengths, out, n, heads, groups, window);
}

// sums [N, 4] += x [count / 16, N, 16] w^T, for four rows of the weight, `row` numbers apart. The four rows at `next`
// come from memory meanwhile: each of `groups` calls fetches its share of them, by its number, `turn`.
template <typename T, int N>
static void add_products(const float *x, const T *w, int64_t row, int64_t count, bool is_first, Run *sums,
                         const T *next, int64_t turn, int64_t groups) {
  Run own[4][N];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++)
#pragma GCC unroll 6
    for (int j = 0; j < N; j++) own[r][j] = is_first ? Run{} : sums[4 * j + r];
  for (int64_t i = 0; i < count; i += 16, x += 16 * N) {
    for (int64_t r = turn; r < 4; r += groups) __builtin_prefetch(next + r * row + i, 0, 2);
    if (groups > 4) turn = turn ? turn - 1 : groups - 1;
#pragma GCC unroll 2
    for (int64_t k = 0; k < 16; k += RUN) {
      Run of_x[N];
#pragma GCC unroll 6
      for (int j = 0; j < N; j++) of_x[j] = run_at(x + 16 * j + k);
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) {
        Run of_w = run_at(w + r * row + i + k);
#pragma GCC unroll 6
        for (int j = 0; j < N; j++) own[r][j] += of_w * of_x[j];
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++)
#pragma GCC unroll 6
    for (int j = 0; j < N; j++) sums[4 * j + r] = own[r][j];
}

constexpr int64_t ROOM_OF_X = 48;  // rows of x for which a weight is read once

// out [n, rows] = x [n, size] weight^T + bias, for n <= 48 and rows and size >= 16. Rows of the weight are `row` numbers
// apart. It is read once, in the order of memory: four of its rows are multiplied while the next come from memory.
// What a row of x gets does not depend on the others.
template <typename T>
static void multiply_some(const T *x, int64_t n, const T *weight, int64_t row, const T *bias, T *out, int64_t size,
                         int64_t rows) {
  constexpr int64_t PART = 1024;  // numbers of a row, at most, that stay in a core's cache beside those of x
  constexpr bool WIDENS = sizeof(T) == 2 && RUN == 8;  // floats of the weight are made once, not for each group
  static const auto add = {add_products<T, 1>, add_products<T, 2>, add_products<T, 3>,
                           add_products<T, 4>, add_products<T, 5>, add_products<T, 6>};
  static const auto add_wide = {add_products<float, 1>, add_products<float, 2>, add_products<float, 3>};
  static thread_local std::vector<float> numbers;
  const int64_t groups = (n + TOGETHER - 1) / TOGETHER, whole = size / 16 * 16;
  const int64_t parts = (whole + PART - 1) / PART, part = (whole / 16 + parts - 1) / parts * 16;
  if ((int64_t)numbers.size() < n * whole + 16) numbers.resize(n * whole + 16);
  float *packed = (float *)(((uintptr_t)numbers.data() + 63) & -64);  // [group, whole / 16, row of it, 16]
#pragma omp parallel for if (groups > 1 && n * size > WORTH)
  for (int64_t g = 0; g < groups; g++)
    for (int64_t begin = g * n / groups, end = (g + 1) * n / groups, j = begin; j < end; j++)
      for (int64_t k = 0; k < whole; k += 16)
        *(Lanes *)(packed + begin * whole + (end - begin) * k + (j - begin) * 16) = at(x + j * size + k);
  // A thread that shares its core with others takes fewer of the parts; a small part leaves the memory idle in between.
  const int64_t least = size < WORTH ? WORTH / size : 1, fair = rows / 16 > least ? rows / 16 : least;
#pragma omp parallel for schedule(dynamic, (fair + 3) / 4) if (size * rows > WORTH)
  for (int64_t o = 0; o < rows; o += 4) {
    Run sums[4 * ROOM_OF_X];
    const int64_t first = o + 4 < rows ? o : rows - 4;  // the last four overlap others, and write only their own
    for (int64_t k = 0; k < whole; k += part) {
      const int64_t count = whole - k < part ? whole - k : part;
      const T *w = weight + first * row + k, *after = weight + (first + 8 <= rows ? first + 4 : rows - 4) * row;
      const T *next = k + count < whole ? w + count : after;
      float wide[WIDENS ? 4 * PART : 1];
      for (int64_t r = 0; WIDENS && groups > 1 && r < 4; r++)
        for (int64_t m = 0; m < count; m += RUN) *(Run *)(wide + r * count + m) = run_at(w + r * row + m);
      for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = g * n / groups, many = (g + 1) * n / groups - begin;
        const float *own = packed + begin * whole + many * k;
        if (WIDENS && groups > 1)
          add_wide.begin()[many - 1](own, wide, count, count, k == 0, sums + 4 * begin, wide, g, groups);
        else
          add.begin()[many - 1](own, w, row, count, k == 0, sums + 4 * begin, next, g, groups);
      }
    }
    for (int64_t i = 4 * n; i % 16; i++) sums[i] = Run{};
    float offsets[4];
    for (int r = 0; r < 4; r++) offsets[r] = bias ? (float)bias[first + r] : 0;
    for (int64_t j = 0; j < n; j += 4) {
      Lanes all = totals(sums + 4 * j);  // of four rows of x with four of the weight
      for (int e = 0; e < 16 && whole < size; e++)
        for (int64_t k = whole, i = j + e / 4; k < size && i < n; k++)
          all[e] += (float)weight[(first + e % 4) * row + k] * (float)x[i * size + k];
      for (int64_t i = 0; i < 4 && j + i < n; i++)
        for (int64_t r = o - first; r < 4; r++) out[(j + i) * rows + first + r] = all[4 * i + r] + offsets[r];
    }
  }
}

// The same for any n.
template <typename T>
static void multiply_any(const T *x, int64_t n, const T *weight, int64_t row, const T *bias, T *out, int64_t size,
                         int64_t rows) {
  const int64_t blocks = (n + ROOM_OF_X - 1) / ROOM_OF_X;
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t begin = i * n / blocks, many = (i + 1) * n / blocks - begin;
    multiply_some(x + begin * size, many, weight, row, bias, out + begin * rows, size, rows);
  }
}

#ifdef HAS_TILES
// ---- the same by the CPU's matrix unit (AMX), whose tiles are 16 rows of 64 bytes --------------------------------

static const struct {
  uint8_t palette, start, none[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} WHOLE_TILES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
constexpr int64_t TILE = 1024;  // bytes

// Whether the system lets this process have the unit: Linux wants to be asked.
static bool may_have_tiles() {
  static const bool may = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* the tiles' state */);
  return may;
}

// Memory of a thread's own, kept from call to call.
struct Scratch {
  std::vector<uint8_t> memory;
  uint8_t *of(int64_t bytes) {
    if ((int64_t)memory.size() < bytes + 64) memory.resize(bytes + 64);
    return (uint8_t *)(((uintptr_t)memory.data() + 63) & -64);
  }
};

// Exchanges what lies W off the diagonal, of 16 x 16 words.
template <int W>
static inline void exchange(Lanes *x) {
  constexpr auto at = [](int k) { return k & W ? 16 + k - W : k; };
  const Words near = {at(0), at(1), at(2),  at(3),  at(4),  at(5),  at(6),  at(7),
                      at(8), at(9), at(10), at(11), at(12), at(13), at(14), at(15)};
  for (int i = 0; i < 16; i++) {
    if (i & W) continue;
    Lanes a = x[i], b = x[i + W];
    x[i] = __builtin_shuffle(a, b, near), x[i + W] = __builtin_shuffle(a, b, near + W);
  }
}

static inline void transpose(Lanes *x) { exchange<8>(x), exchange<4>(x), exchange<2>(x), exchange<1>(x); }

static inline Shorts rounded(Lanes x) {  // as Half rounds one number
  const Words words = (Words)x, up = (words + 0x7fff + (words >> 16 & 1)) >> 16;
  return __builtin_convertvector(x == x ? up : Words{} + 0x7fc0, Shorts);
}

static inline void put_from(int64_t begin, Half *to, Lanes x) {  // the lanes from `begin` on
  const Shorts result = rounded(x);
  if (!begin) *(Shorts *)to = result;
  for (int64_t r = begin; begin && r < 16; r++) to[r].bits = result[r];
}

static inline void put_from(int64_t begin, float *to, Lanes x) {
  _mm512_mask_storeu_ps(to, (__mmask16)(0xffff << begin), (__m512)x);
}

// Writes a tile of sums, of 16 rows of a weight with `many` rows of x, to those of `out`; only the lanes from `begin` on.
template <typename T>
static inline void put_sums(const Lanes *sums, Lanes offsets, T *out, int64_t row, int64_t many, int64_t begin) {
  Lanes own[16];
  memcpy(own, sums, sizeof own);
  if (many > 3) transpose(own);
  for (int64_t j = 0; j < many; j++) {
    Lanes sum = own[j];
    for (int r = 0; r < 16 && many <= 3; r++) sum[r] = own[r][j];
    put_from(begin, out + j * row, sum + offsets);
  }
}

#define EACH_GROUP(of) of(0) of(1) of(2) of(3) of(4) of(5)
#define CLEAR(g) \
  if (N > g) _tile_zero(g);
#define ADD(g)                                   \
  if (N > g) {                                   \
    _tile_loadd(7, x + (g * count + t) * 512, 64); \
    _tile_dpbf16ps(g, 6, 7);                     \
  }
#define STORE(g) \
  if (N > g) _tile_stored(g, sums + 16 * g, 64);

// sums [N, 16 rows of the weight, 16 of x] = w x^T, for `count` tiles of the weight, in the order of memory; `next` is
// where it goes on. x [N, count, tile]
template <int N>
static void multiply_tiles(const Half *w, int64_t row, const Half *next, const Half *x, int64_t count, Lanes *sums) {
  constexpr int64_t AHEAD = 4;  // tiles that come from memory meanwhile
  EACH_GROUP(CLEAR)
  for (int64_t t = 0; t < count; t++) {
    const Half *after = t + AHEAD < count ? w + (t + AHEAD) * 32 : next + (t + AHEAD - count) * 32;
    for (int r = 0; r < 16; r++) __builtin_prefetch(after + r * row, 0, 2);
    _tile_loadd(6, w + t * 32, row * 2);
    EACH_GROUP(ADD)
  }
  EACH_GROUP(STORE)
}

// multiply_any() for n <= 96, whole tiles of `size`, and rows >= 16. Here too a row of x does not depend on the others.
static void multiply_by_tiles(const Half *x, int64_t n, const Half *weight, int64_t row, const Half *bias, Half *out,
                              int64_t size, int64_t rows) {
  static const auto products = {multiply_tiles<1>, multiply_tiles<2>, multiply_tiles<3>,
                                multiply_tiles<4>, multiply_tiles<5>, multiply_tiles<6>};
  static thread_local Scratch memory;
  const int64_t groups = (n + 15) / 16, count = size / 32, some = ((rows + 15) / 16 + 15) / 16;
  Half *packed = (Half *)memory.of(groups * count * TILE);  // [group, count, pair of numbers, row of it, 2]
#pragma omp parallel for if (n * size > WORTH)
  for (int64_t i = 0; i < groups * count; i++) {
    Lanes tile[16] = {};
    const int64_t first = i / count * 16;
    const Half *from = x + first * size + i % count * 32;
    for (int64_t j = 0; j < 16 && first + j < n; j++) tile[j] = *(const Lanes *)(from + j * size);
    transpose(tile);
    memcpy((void *)(packed + 512 * i), tile, sizeof tile);
  }
#pragma omp parallel if (size * rows > WORTH)
  {
    _tile_loadconfig(&WHOLE_TILES);
#pragma omp for schedule(dynamic, some)
    for (int64_t o = 0; o < rows; o += 16) {
      alignas(64) Lanes sums[6 * 16];
      const int64_t first = o + 16 < rows ? o : rows - 16;  // the last overlap others, and write only their own
      const Half *w = weight + first * row, *next = first + 32 <= rows ? w + 16 * row : w;
      products.begin()[groups - 1](w, row, next, packed, count, sums);
      Lanes offsets = {};
      if (bias) offsets = at(bias + first);
      for (int64_t g = 0; g < groups; g++) {
        const int64_t many = n - 16 * g < 16 ? n - 16 * g : 16;
        put_sums(sums + 16 * g, offsets, out + 16 * g * rows + first, rows, many, o - first);
      }
    }
    _tile_release();
  }
}

// Numbers of a matrix: of its rows, which are `row` numbers apart, or, if it is turned, of its columns.
struct Matrix {
  const float *numbers;
  int64_t row;
  bool is_turned;
  const float *at(int64_t i, int64_t k) const { return numbers + (is_turned ? k * row + i : i * row + k); }
};

// 16 floats of each of two places, in three tiles' rows, which are TILE bytes apart: a float is the sum of three
// bfloat16, of 8 of its 24 bits each. A word of a row holds a part of one of the first and one of the second. (An
// infinity becomes NaN, and products below 2^-102 lose their last bits.)
static inline void split(const float *first, const float *second, uint8_t *to) {
  Lanes a = at(first), b = at(second);
  for (int part = 0; part < 3; part++) {
    const uint32_t nearest = part < 2 ? 0x8000 : 0;  // the last is what is left
    const Words of_a = ((Words)a + nearest) & 0xffff0000, of_b = ((Words)b + nearest) & 0xffff0000;
    *(Lanes *)(to + part * TILE) = (Lanes)(of_a >> 16 | of_b);
    a -= (Lanes)of_a, b -= (Lanes)of_b;
  }
}

static inline void transpose_parts(uint8_t *tiles) {
  for (int part = 0; part < 3; part++) transpose((Lanes *)(tiles + part * TILE));
}

// Three tiles [word, row] of up to 16 rows of x and their numbers k .. k + 32; zeros for those that are not.
static void split_columns(const Matrix &x, int64_t first, int64_t k, int64_t n, int64_t size, uint8_t *to) {
  const int64_t many = n - first < 16 ? n - first : 16;
  if (x.is_turned) {
    float own[32][16] = {};
    for (int64_t i = 0; i < 32 && k + i < size; i++) memcpy(own[i], x.at(first, k + i), 4 * many);
    for (int i = 0; i < 16; i++) split(own[i], own[i + 16], to + 64 * i);
    return;
  }
  if (many < 16) memset(to, 0, 3 * TILE);
  for (int64_t j = 0; j < many; j++) split(x.at(first + j, k), x.at(first + j, k + 16), to + 64 * j);
  transpose_parts(to);
}

#define EACH_SUM(of) of(0) of(1) of(2) of(3)  // [N, 2]
#define CLEAR_SUM(i) \
  if (2 * N > i) _tile_zero(i);
#define LOAD_SUM(i) \
  if (2 * N > i) _tile_loadd(i, sums + 16 * i, 64);
#define STORE_SUM(i) \
  if (2 * N > i) _tile_stored(i, sums + 16 * i, 64);
#define LOAD_A(part)                      \
  _tile_loadd(4, of_a + part * TILE, 64); \
  _tile_loadd(5, of_a + (3 + part) * TILE, 64);
#define LOAD_B(part)                      \
  _tile_loadd(6, of_b + part * TILE, 64); \
  if (N > 1) _tile_loadd(7, of_b + of_group + part * TILE, 64);
#define ADD_PRODUCTS         \
  _tile_dpbf16ps(0, 4, 6);   \
  _tile_dpbf16ps(1, 5, 6);   \
  if (N > 1) {               \
    _tile_dpbf16ps(2, 4, 7); \
    _tile_dpbf16ps(3, 5, 7); \
  }

// Tiles of one side's parts in a core's cache, and its rows, at least: they are made before others are multiplied. That
// side is x, but of more than ROWS_OF_X rows of x it is the weight.
constexpr int64_t ROOM = 256, PANEL = 256, ROWS_OF_X = 768;

// Writes a tile of sums, of 16 rows of a weight from `row` on with `many` rows of x; only what is of rows from `o` on.
static inline void put_turned(const Lanes *sums, int64_t row, int64_t o, const float *bias, int64_t many, float *out,
                              int64_t row_of_out) {
  const int64_t skip = o - row < 0 ? 0 : o - row < 16 ? o - row : 16;
  put_sums(sums, bias ? at(bias + row) : Lanes{}, out + row, row_of_out, many < 16 ? many : 16, skip);
}

// The same of 16 rows of x from `row` on, with `many` rows of a weight.
static inline void put_straight(const Lanes *sums, int64_t row, int64_t o, const float *bias, int64_t many, float *out,
                                int64_t row_of_out) {
  const __mmask16 own = many < 16 ? (1 << many) - 1 : 0xffff;
  const __m512 offsets = bias ? _mm512_maskz_loadu_ps(own, bias) : _mm512_setzero_ps();
  for (int64_t r = o > row ? o - row : 0; r < 16; r++)
    _mm512_mask_storeu_ps(out + (row + r) * row_of_out, own, _mm512_add_ps((__m512)sums[r], offsets));
}

// Two tiles of 32 numbers of a weight's rows `first` on, from number `k` on: parts [2, 3, tile]. `next`: read later.
static inline void split_rows(const Matrix &w, int64_t first, int64_t k, const float *next, uint8_t *parts) {
  const float *own = w.at(first, k);
  for (int64_t r = 0; r < 32; r++, own += w.row, next += w.row) {
    __builtin_prefetch(next), __builtin_prefetch(next + 16);
    split(own, own + 16, parts + r / 16 * 3 * TILE + r % 16 * 64);
  }
}

// The same for rows of either order of memory, of `count` tiles, a few rows at a time: while others are multiplied.
struct Splitting {
  const Matrix &matrix;
  int64_t size, first, k, all;  // all: pairs of 16 numbers
  uint8_t *parts;               // [count, 2, 3, tile]
  int64_t done = 0;

  void some(int64_t many) {
    for (const int64_t end = done + many < all ? done + many : all; done < end; done++) {
      const int64_t from = k + done / 32 * 32, half = done / 16 % 2, r = done % 16;
      uint8_t *to = parts + done / 16 * 3 * TILE;
      if (!matrix.is_turned) {
        const float *own = matrix.at(first + 16 * half + r, from);
        __builtin_prefetch(own + 64), __builtin_prefetch(own + 80);
        split(own, own + 16, to + 64 * r);
        continue;
      }
      const int64_t last = size - 1, one = from + r < last ? from + r : last, other = one + 16 < last ? one + 16 : last;
      const float *own = matrix.at(first + 16 * half, one);  // past the end the others are zero
      __builtin_prefetch(own + 64 * matrix.row), __builtin_prefetch(own + 80 * matrix.row);
      split(own, matrix.at(first + 16 * half, other), to + 64 * r);
      if (r == 15) transpose_parts(to);
    }
  }
};

// sums [N, 2, 16 rows of a, 16 of b] += a b^T for `count` tiles of each; 0 before, if it `starts`. Of the nine products
// of two numbers' parts six are added: the others are less than a float's last bit. IS_A: a is the weight, b are rows of
// x, else it is the other way round; the order of the six, and so the sums, do not depend on that.
// a [all or, if `kept` is 1, two; 2, 3, tile], b [N, of_group / 3 / TILE, 3, tile]. `meanwhile`: done beside each tile.
template <int N, bool IS_A, typename Meanwhile>
static inline void add_float_tiles(const uint8_t *a, int64_t kept, const uint8_t *b, int64_t of_group, int64_t count,
                                   bool starts, Lanes *sums, const Meanwhile &meanwhile) {
  asm volatile("" ::: "memory");  // the compiler does not know what a tile's load reads
  if (starts) {
    EACH_SUM(CLEAR_SUM)
  } else {
    EACH_SUM(LOAD_SUM)
  }
  for (int64_t t = 0; t < count; t++) {
    const uint8_t *of_a = a + (t & kept) * 6 * TILE, *of_b = b + t * 3 * TILE;
    if (IS_A) {
      LOAD_A(0) LOAD_B(2) ADD_PRODUCTS LOAD_B(1) ADD_PRODUCTS LOAD_A(1) ADD_PRODUCTS
      LOAD_B(0) ADD_PRODUCTS LOAD_A(2) ADD_PRODUCTS LOAD_A(0) ADD_PRODUCTS
    } else {
      LOAD_B(0) LOAD_A(2) ADD_PRODUCTS LOAD_A(1) ADD_PRODUCTS LOAD_B(1) ADD_PRODUCTS
      LOAD_A(0) ADD_PRODUCTS LOAD_B(2) ADD_PRODUCTS LOAD_B(0) ADD_PRODUCTS
    }
    meanwhile(t);
    asm volatile("" ::: "memory");
  }
  EACH_SUM(STORE_SUM)
  asm volatile("" ::: "memory");
}

// out [n, rows] = x weight^T + bias of floats, for n <= 32, rows >= 32 and whole tiles of `size`: a weight is read once.
static void multiply_few_floats(const Matrix &x, int64_t n, const Matrix &weight, const float *bias, float *out,
                                int64_t size, int64_t rows) {
  constexpr int64_t AHEAD = 3;  // tiles that come from memory meanwhile
  static thread_local Scratch of_x;
  const int64_t groups = (n + 15) / 16, blocks = (rows + 31) / 32, count = size / 32, of_group = count * 3 * TILE;
  const int64_t share = (blocks + 31) / 32, some = share < 8 ? share : 8;
  uint8_t *packed = of_x.of(groups * of_group);  // [group, count, 3, word, row of x]
#pragma omp parallel for if (n * size > WORTH)
  for (int64_t i = 0; i < groups * count; i++)
    split_columns(x, i / count * 16, i % count * 32, n, size, packed + i * 3 * TILE);
#pragma omp parallel if (size * rows > WORTH)
  {
    _tile_loadconfig(&WHOLE_TILES);
    alignas(64) uint8_t parts[2 * 6 * TILE];
    alignas(64) Lanes own_sums[4 * 16];
#pragma omp for schedule(dynamic, some)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t o = block * 32, first = o + 32 < rows ? o : rows - 32;  // the last write only their own
      const float *next = weight.at(first + 64 <= rows ? first + 32 : first, 0);
      const auto make = [&](int64_t t) __attribute__((always_inline)) {
        const float *after = t + AHEAD < count ? weight.at(first, (t + AHEAD) * 32) : next + (t + AHEAD - count) * 32;
        split_rows(weight, first, t * 32, after, parts + (t & 1) * 6 * TILE);
      };
      const auto meanwhile = [&](int64_t t) __attribute__((always_inline)) {
        if (t + 1 < count) make(t + 1);
      };
      make(0);
      const auto add = groups > 1 ? add_float_tiles<2, true, decltype(meanwhile)>
                                  : add_float_tiles<1, true, decltype(meanwhile)>;
      add(parts, 1, packed, of_group, count, true, own_sums, meanwhile);
      for (int64_t i = 0; i < 2 * groups; i++)
        put_turned(own_sums + 16 * i, first + i % 2 * 16, o, bias, n - i / 2 * 16, out + i / 2 * 16 * rows, rows);
    }
    _tile_release();
  }
}

// out = x weight^T + bias of floats, where a is the weight and b is x (IS_A), or the other way round: blocks of 32 rows of
// a, which threads take as they come, with all n_b rows of b, whose parts stay in a core's cache for a run of numbers. A
// thread splits its next block while tiles of this one are multiplied.
template <bool IS_A>
static void multiply_blocks(const Matrix &a, int64_t n_a, const Matrix &b, int64_t n_b, const float *bias, float *out,
                            int64_t row_of_out, int64_t size) {
  constexpr int64_t BAND = 128;  // blocks
  static thread_local Scratch of_b, of_sums;
  const int64_t groups = (n_b + 15) / 16, pairs = (groups + 1) / 2, blocks = (n_a + 31) / 32, whole = (size + 31) / 32;
  const int64_t run = whole < ROOM / groups ? whole : ROOM / groups, of_group = run * 3 * TILE;
  const int64_t share = (31 + pairs) / pairs;  // of the next block's splits, beside each tile
  const int64_t of_block = groups * 2 * TILE, band = run < whole && BAND < blocks ? BAND : blocks;
  uint8_t *packed = of_b.of(groups * of_group);                      // [group, run, 3, word, row of b]
  uint8_t *all_sums = of_sums.of(run < whole ? band * of_block : 0);  // [block, group, 2, tile]
  for (int64_t begin = 0; begin < blocks; begin += band)
    for (int64_t k = 0; k < whole; k += run) {
      const int64_t count = whole - k < run ? whole - k : run, end = blocks - begin < band ? blocks : begin + band;
      int64_t taken = begin;
#pragma omp parallel if (count * 32 * n_a > WORTH)
      {
        _tile_loadconfig(&WHOLE_TILES);
        static thread_local Scratch own;
        uint8_t *parts = own.of(2 * run * 6 * TILE), *next_parts = parts + run * 6 * TILE;
        alignas(64) Lanes own_sums[4 * 16];
        const auto take = [&] {
          int64_t block;
#pragma omp atomic capture
          block = taken++;
          return block;
        };
        const auto row_of = [&](int64_t block) { return block * 32 + 32 < n_a ? block * 32 : n_a - 32; };
#pragma omp for
        for (int64_t i = 0; i < groups * count; i++) {
          const int64_t group = b.is_turned ? i % groups : i / count, t = b.is_turned ? i / groups : i % count;
          split_columns(b, group * 16, (k + t) * 32, n_b, size, packed + group * of_group + t * 3 * TILE);
        }
        int64_t block = take();
        if (block < end) Splitting{a, size, row_of(block), k * 32, count * 32, parts}.some(count * 32);
        while (block < end) {
          const int64_t after = take(), o = block * 32, first = row_of(block);
          Splitting next = {a, size, row_of(after), k * 32, after < end ? count * 32 : 0, next_parts};
          const auto meanwhile = [&](int64_t) __attribute__((always_inline)) { next.some(share); };
          for (int64_t g = 0; g < groups; g += 2) {
            Lanes *sums = run < whole ? (Lanes *)(all_sums + (block - begin) * of_block) + 32 * g : own_sums;
            const auto add = g + 1 < groups ? add_float_tiles<2, IS_A, decltype(meanwhile)>
                                            : add_float_tiles<1, IS_A, decltype(meanwhile)>;
            add(parts, -1, packed + g * of_group, of_group, count, !k, sums, meanwhile);
            for (int64_t i = 0; k + count == whole && i < 4 && g + i / 2 < groups; i++) {
              const int64_t column = 16 * (g + i / 2), row = first + i % 2 * 16, many = n_b - column;
              if (IS_A)
                put_turned(sums + 16 * i, row, o, bias, many, out + column * row_of_out, row_of_out);
              else
                put_straight(sums + 16 * i, row, o, bias ? bias + column : bias, many, out + column, row_of_out);
            }
          }
          next.some(count * 32);
          std::swap(parts, next_parts);
          block = after;
        }
        _tile_release();
      }
    }
}

// out [n, rows] = x weight^T + bias of floats, for rows >= 32, and whole tiles of `size` but where both are turned. What
// a row of x gets does not depend on the others.
static void multiply_floats(const Matrix &x, int64_t n, const Matrix &weight, const float *bias, float *out, int64_t size,
                            int64_t rows) {
  if (n <= 32 && !x.is_turned && !weight.is_turned)
    return multiply_few_floats(x, n, weight, bias, out, size, rows);
  const int64_t room = ROOM / ((size + 31) / 32) * 16, panel = room > PANEL ? room : PANEL;
  for (int64_t i = 0; n <= ROWS_OF_X && i < n; i += panel)
    multiply_blocks<true>(weight, rows, {x.at(i, 0), x.row, x.is_turned}, n - i < panel ? n - i : panel, bias,
                          out + i * rows, rows, size);
  for (int64_t i = 0; n > ROWS_OF_X && i < rows; i += panel)
    multiply_blocks<false>(x, n, {weight.at(i, 0), weight.row, weight.is_turned}, rows - i < panel ? rows - i : panel,
                           bias ? bias + i : bias, out + i, rows, size);
}

// The same where both are turned and there is little to write: sums of up to 32 parts of the numbers, and then of these.
static void multiply_long_floats(const Matrix &x, int64_t n, const Matrix &weight, float *out, int64_t size,
                                 int64_t rows) {
  static thread_local Scratch of_sums;
  const int64_t some = size > 32 * 512 ? (size + 1023) / 1024 * 32 : 512;
  const int64_t parts = (size + some - 1) / some, each = n * rows;
  float *sums = (float *)of_sums.of(parts * each * 4);
#pragma omp parallel for schedule(dynamic)
  for (int64_t part = 0; part < parts; part++) {
    const int64_t k = part * some;
    multiply_floats({x.at(0, k), x.row, true}, n, {weight.at(0, k), weight.row, true}, nullptr, sums + part * each,
                    size - k < some ? size - k : some, rows);
  }
#pragma omp parallel for if (each > WORTH)
  for (int64_t i = 0; i < each; i++) {
    float sum = 0;
    for (int64_t part = 0; part < parts; part++) sum += sums[part * each + i];
    out[i] = sum;
  }
}
#endif

extern "C" bool has_tiles() {
#ifdef HAS_TILES
  return may_have_tiles();
#else
  return false;
#endif
}

struct Hash {
  uint64_t golden, mix1, mix2, numbers;
};

// The time at which a runner of rate 1 arrives: -log of `uniforms`.
static double arrival(const Hash &hash, uint64_t key, uint64_t position, uint64_t place) {
  uint64_t x = key + (position * hash.numbers + 1) * hash.golden + place * hash.golden;
  x = (x ^ (x >> 30)) * hash.mix1;
  x = (x ^ (x >> 27)) * hash.mix2;
  return -std::log(((double)((x ^ (x >> 31)) >> 12) + 0.5) * 0x1p-52);
}

extern "C" void race(const float *logits, const int64_t *keys, const int64_t *positions, int64_t *tokens,
                     float *logprobs, int64_t n, int64_t vocab, int64_t row_of_logits, int64_t block,
                     float temperature, const Hash *hash) {
#pragma omp parallel for if (n > 1 && n * vocab > WORTH / 4)
  for (int64_t row = 0; row < n; row++) {
    static thread_local std::vector<float> rates;
    rates.resize(vocab);
    const float *x = logits + row * row_of_logits;
    float peak = x[0];
    double best = -1, sum = 0;
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < vocab; i++) peak = x[i] > peak ? x[i] : peak;
    for (int64_t i = 0; i < vocab; i++) rates[i] = exponential((x[i] - peak) / temperature);
    int64_t blocks = (vocab + block - 1) / block, first = 0, token = 0;
    for (int64_t b = 0; b < blocks; b++) {
      int64_t end = (b + 1) * block < vocab ? (b + 1) * block : vocab;
      float mass = 0;
#pragma omp simd reduction(+ : mass)
      for (int64_t i = b * block; i < end; i++) mass += rates[i];
      sum += mass;
      double speed = mass / arrival(*hash, keys[row], positions[row], b);
      if (speed > best) best = speed, first = b;
    }
    best = -1;
    for (int64_t i = first * block; i < vocab && i < (first + 1) * block; i++) {
      double speed = rates[i] / arrival(*hash, keys[row], positions[row], blocks + i - first * block);
      if (speed > best) best = speed, token = i;
    }
    tokens[row] = token;
    logprobs[row] = (x[token] - peak) / temperature - (float)std::log(sum);
  }
}

// The state of the decoding rows, as engine/rows.py has it.
struct Rows {
  int64_t *last_token, *length, *count, *limit, *ended, *tokens;
  float *logprobs;
  bool *heeds_eos;
  const int64_t *eos_ids;
  int64_t num_eos, width;  // width: of tokens and log-probs
};

// start, drafts, kept: null without drafts.
extern "C" void settle(const Rows *rows, int64_t first, const int64_t *start, const int64_t *drafts,
                       const int64_t *tokens, const float *logprobs, int64_t *kept, int64_t n, int64_t num_tokens) {
  for (int64_t i = 0; i < n; i++) {
    int64_t row = first + i, count = rows->count[row], begin = start ? start[i] : i, place = begin;
    int64_t end = !start ? i + 1 : i + 1 < n ? start[i + 1] : num_tokens;
    if (rows->ended[row]) continue;
    for (bool goes_on = true; goes_on; place++, count++) {
      rows->tokens[row * rows->width + count] = tokens[place];
      rows->logprobs[row * rows->width + count] = logprobs[place];
      goes_on = place + 1 < end && tokens[place] == drafts[place + 1];
    }
    int64_t newest = tokens[place - 1];
    bool stops = false;
    for (int64_t e = 0; e < rows->num_eos; e++) stops |= newest == rows->eos_ids[e] && rows->heeds_eos[row];
    if (stops || count >= rows->limit[row]) rows->ended[row] = 2 * count + stops;
    rows->last_token[row] = newest, rows->count[row] = count;
    if (kept) kept[i] = place - begin, rows->length[row] += place - begin;
  }
}

// ---- attention of packed sequences, and its gradient (engine/gradients.py) --------------------------------------------

struct Packed {
  const float *q, *k, *v;  // [T, heads * groups, SIZE], [T, heads, SIZE] twice
  const int64_t *starts;   // of each sequence, and the end of the last
  int64_t heads, groups, window;
};

// Up to 16 queries of one key head, each in a lane, that stand one behind another: heads of a token, tokens of a sequence.
template <int SIZE>
struct Tile {
  int64_t lanes, begin, end;  // keys that a lane attends to: begin .. end of the sequence
  int64_t places[16];         // of each query
  float queries[SIZE][16];    // times the scale
  const float scale = 1 / std::sqrt((float)SIZE);

  Tile(const Packed &a, int64_t start, int64_t head, int64_t first, int64_t count) {
    lanes = count - first < 16 ? count - first : 16;
    begin = first / a.groups + 1 - a.window, end = (first + lanes - 1) / a.groups + 1;
    if (!a.window || begin < 0) begin = 0;
    for (int lane = 0; lane < 16; lane++) {
      int64_t query = first + (lane < lanes ? lane : 0);
      places[lane] = (((start + query / a.groups) * a.heads + head) * a.groups + query % a.groups) * SIZE;
      for (int i = 0; i < SIZE; i++) queries[i][lane] = a.q[places[lane] + i] * scale;
    }
  }

  // weights[t - begin][lane]: how much of each key a lane takes.
  void weights(const Packed &a, const float *keys, int64_t first, float *out) const {
    int64_t row = a.heads * SIZE, sure = first / a.groups + 1;  // keys before it are those of all lanes, but for a window
    product<float, SIZE>(keys + begin * row, row, queries, out, 16, end - begin, false);
    float peaks[16], sums[16] = {};
    for (int lane = 0; lane < 16; lane++) peaks[lane] = -INFINITY;
    for (int64_t t = begin; t < end; t++) {
      float *own = out + 16 * (t - begin);
      if (t >= sure || a.window)
        for (int lane = 0; lane < 16; lane++) {
          int64_t after = (first + (lane < lanes ? lane : 0)) / a.groups + 1;
          own[lane] = t < after && (!a.window || t >= after - a.window) ? own[lane] : -INFINITY;
        }
      for (int lane = 0; lane < 16; lane++) peaks[lane] = own[lane] > peaks[lane] ? own[lane] : peaks[lane];
    }
    for (float *own = out; own < out + 16 * (end - begin); own += 16)
      for (int lane = 0; lane < 16; lane++) sums[lane] += own[lane] = exponential(own[lane] - peaks[lane]);
    for (int lane = 0; lane < 16; lane++) sums[lane] = 1 / sums[lane];
    for (float *own = out; own < out + 16 * (end - begin); own += 16)
      for (int lane = 0; lane < 16; lane++) own[lane] *= sums[lane];
  }
};

template <int SIZE>
static void packed_forward(const Packed &a, int64_t start, int64_t length, int64_t head, float *memory, float *out) {
  const float *keys = a.k + (start * a.heads + head) * SIZE, *values = a.v + (start * a.heads + head) * SIZE;
  int64_t row = a.heads * SIZE, count = length * a.groups;
  for (int64_t first = 0; first < count; first += 16) {
    Tile<SIZE> tile(a, start, head, first, count);
    tile.weights(a, keys, first, memory);
    for (int64_t part = 0; part < SIZE; part += 16) {
      Lanes sums[16] = {};
      weigh(memory, values + tile.begin * row + part, row, tile.end - tile.begin, sums);
      for (int lane = 0; lane < tile.lanes; lane++) *(Lanes *)(out + tile.places[lane] + part) = sums[lane];
    }
  }
}

// The gradients of q, k and v; those of k and v are zero before.
template <int SIZE>
static void packed_backward(const Packed &a, int64_t start, int64_t length, int64_t head, float *memory,
                            const float *out, const float *gradient, float *of_q, float *of_k, float *of_v) {
  constexpr int PARTS = SIZE / 16;
  int64_t row = a.heads * SIZE, count = length * a.groups, at_head = (start * a.heads + head) * SIZE;
  float *change = memory + 16 * length;  // of the weights, then of the scores
  for (int64_t first = 0; first < count; first += 16) {
    Tile<SIZE> tile(a, start, head, first, count);
    tile.weights(a, a.k + at_head, first, memory);
    int64_t keys = tile.end - tile.begin, place = at_head + tile.begin * row;
    float columns[SIZE][16], own[PARTS][16][16], queries[PARTS][16][16], along[16] = {};
    for (int lane = 0; lane < 16; lane++)
      for (int i = 0; i < SIZE; i++) {
        float x = lane < tile.lanes ? gradient[tile.places[lane] + i] : 0;
        columns[i][lane] = own[i / 16][lane][i % 16] = x;
        queries[i / 16][lane][i % 16] = tile.queries[i][lane];
        along[lane] += x * out[tile.places[lane] + i];
      }
    product<float, SIZE>(a.v + place, row, columns, change, 16, keys, false);
    for (int64_t t = 0; t < keys; t++)
      for (int lane = 0; lane < 16; lane++)
        change[16 * t + lane] = memory[16 * t + lane] * (change[16 * t + lane] - along[lane]);
    for (int part = 0; part < PARTS; part++) {
      Lanes sums[16] = {};
      weigh(change, a.k + place + 16 * part, row, keys, sums);
      for (int lane = 0; lane < tile.lanes; lane++)
        *(Lanes *)(of_q + tile.places[lane] + 16 * part) = sums[lane] * tile.scale;
      product<float, 16>(memory, 16, own[part], of_v + place + 16 * part, row, keys, true);
      product<float, 16>(change, 16, queries[part], of_k + place + 16 * part, row, keys, true);
    }
  }
}

template <int SIZE>
static void packed_all(const Packed &a, int64_t n, const float *gradient, float *out, float *of_q, float *of_k,
                       float *of_v) {
#pragma omp parallel for schedule(dynamic) if (n * a.heads > 1)
  for (int64_t task = 0; task < n * a.heads; task++) {
    static thread_local std::vector<float> memory;
    int64_t start = a.starts[task / a.heads], length = a.starts[task / a.heads + 1] - start, head = task % a.heads;
    if ((int64_t)memory.size() < 32 * length) memory.resize(32 * length);
    if (gradient)
      packed_backward<SIZE>(a, start, length, head, memory.data(), out, gradient, of_q, of_k, of_v);
    else
      packed_forward<SIZE>(a, start, length, head, memory.data(), out);
  }
}

// Without a gradient: writes `out`. With that of `out`: reads it, and writes those of q, k and v.
extern "C" void packed_attention(const Packed *a, int64_t n, int64_t size, const float *gradient, float *out,
                                 float *of_q, float *of_k, float *of_v) {
  auto all = size == 16   ? packed_all<16>
             : size == 32 ? packed_all<32>
             : size == 64 ? packed_all<64>
             : size == 80 ? packed_all<80>
             : size == 96 ? packed_all<96>
                          : packed_all<128>;
  all(*a, n, gradient, out, of_q, of_k, of_v);
}

// ---- what native.py calls ----------------------------------------------------------------------------------------

#define FOR_BOTH(call) \
  if (half) {          \
    typedef Half T;    \
    call;              \
  } else {             \
    typedef float T;   \
    call;              \
  }

extern "C" void add_rms_norm(bool half, const void *x, const void *residual, const void *weight, void *normed,
                             void *summed, int64_t n, int64_t size, float eps) {
  FOR_BOTH(add_rms_norm_of((const T *)x, (const T *)residual, (const T *)weight, (T *)normed, (T *)summed, n, size,
                           eps))
}

extern "C" void multiply(bool half, const void *x, int64_t n, const void *weight, int64_t row, const void *bias,
                         void *out, int64_t size, int64_t rows) {
#ifdef HAS_TILES
  const bool is_whole = size % 32 == 0 && may_have_tiles();
  if (is_whole && half)
    return multiply_by_tiles((const Half *)x, n, (const Half *)weight, row, (const Half *)bias, (Half *)out, size,
                             rows);
  if (is_whole && n > LANE_ROWS && rows >= 32)
    return multiply_floats({(const float *)x, size, false}, n, {(const float *)weight, row, false}, (const float *)bias,
                             (float *)out, size, rows);
#endif
  FOR_BOTH(multiply_any((const T *)x, n, (const T *)weight, row, (const T *)bias, (T *)out, size, rows))
}

// For training: x [n, size], weight [rows, size], in this order of memory or, turned, in the other one.
extern "C" void multiply_turned(const float *x, int64_t row_of_x, bool is_x_turned, int64_t n, const float *weight,
                                int64_t row, bool is_weight_turned, const float *bias, float *out, int64_t size,
                                int64_t rows) {
#ifdef HAS_TILES
  if (!may_have_tiles()) return;
  if (is_x_turned && is_weight_turned && !bias && size >= 2048 && n * rows <= 1 << 18)
    multiply_long_floats({x, row_of_x, true}, n, {weight, row, true}, out, size, rows);
  else
    multiply_floats({x, row_of_x, is_x_turned}, n, {weight, row, is_weight_turned}, bias, out, size, rows);
#endif
}

extern "C" void silu_mul(bool half, const void *gate_up, void *out, int64_t n, int64_t blocks, int64_t width) {
  FOR_BOTH(silu_mul_of((const T *)gate_up, (T *)out, n, blocks, width))
}

extern "C" void silu_mul_backward(bool half, const void *gradient, const void *gate_up, void *out, int64_t n,
                                  int64_t blocks, int64_t width) {
  FOR_BOTH(silu_mul_backward_of((const T *)gradient, (const T *)gate_up, (T *)out, n, blocks, width))
}

extern "C" void rms_norm_backward(bool half, const void *gradient, const void *x, const void *weight, void *out,
                                  float *of_weight, int64_t n, int64_t size, int64_t parts, float eps) {
  FOR_BOTH(rms_norm_backward_of((const T *)gradient, (const T *)x, (const T *)weight, (T *)out, of_weight, n, size,
                                parts, eps))
}

extern "C" void rope_and_write(bool half, const void *qkv, const void *cos, const void *sin, const int64_t *positions,
                               const int32_t *table, int64_t row_of_table, const Pages *pages, const void *q_norm,
                               const void *k_norm, void *q, int64_t n, int64_t heads, int64_t groups, int64_t size,
                               float eps) {
  FOR_BOTH(rope_and_write_of((const T *)qkv, (const T *)cos, (const T *)sin, positions, table, row_of_table, pages,
                             (const T *)q_norm, (const T *)k_norm, (T *)q, n, heads, groups, size, eps))
}

extern "C" void paged_decode(bool half, const void *q, const Pages *pages, const int32_t *table, int64_t row_of_table,
                             const int32_t *lengths, void *out, int64_t n, int64_t heads, int64_t groups, int64_t size,
                             int64_t window) {
  FOR_BOTH(paged_decode_of((const T *)q, pages, table, row_of_table, lengths, (T *)out, n, heads, groups, size, window))
}

// ---- all layers of a decode step, in one call: as `Shard.decode`, by the functions above --------------------------

struct Weight {
  const void *data, *bias;
  int64_t row, rows, size;  // numbers from a row to the next; rows; numbers of each
  int64_t least, most;      // rows of x, of floats, that `multiply` takes; others are BLAS's
};

struct Layer {
  Weight qkv, out, gate_up, down;
  const void *input_norm, *post_norm, *q_norm, *k_norm;
  int64_t window;
};

typedef void (*Blas)(const char *, const char *, const int *, const int *, const int *, const float *, const float *,
                     const int *, const float *, const int *, const float *, float *, const int *);

struct Step {
  const void *cos, *sin;
  const int64_t *positions;
  const int32_t *table;
  const void *norm;  // the last one
  Blas blas;
  int64_t n, row_of_table, of_layer;  // of_layer: numbers from a layer's keys to the next one's
  int64_t hidden, heads, groups, size, blocks;
  Pages pages;  // of the first layer
  float eps;
};

template <typename T>
static T *apply(const Weight &w, const Step &s, const T *x, T *out) {
  constexpr bool is_half = sizeof(T) == 2;
  if (is_half || (s.n >= w.least && s.n <= w.most)) {
    multiply(is_half, x, s.n, w.data, w.row, w.bias, out, w.size, w.rows);
    return out;
  }
  const int rows = w.rows, n = s.n, size = w.size, row = w.row;
  const float one = 1, kept = w.bias ? 1 : 0;
  for (int64_t i = 0; w.bias && i < n; i++) memcpy((void *)(out + i * rows), w.bias, rows * sizeof(T));
  s.blas("T", "N", &rows, &n, &size, &one, (const float *)w.data, &row, (const float *)x, &size, &kept, (float *)out,
         &rows);
  return out;
}

// x [n, hidden] becomes the sum of all residuals, out [n, hidden] its norm. `memory`: for the widest of what stands
// between (`Layers` in native.py).
template <typename T>
static void decode_of(const Layer *layers, int64_t count, const Step &s, T *x, T *out, T *memory) {
  const int64_t attended = s.heads * s.groups * s.size, keys = s.heads * (s.groups + 2) * s.size;
  const int64_t inner = layers->down.size, widest = keys > 2 * inner ? keys : 2 * inner;
  const auto behind = [&](T *from, int64_t numbers) { return from + (s.n * numbers + 31) / 32 * 32; };  // as tensors lie
  T *part = memory, *wide = behind(part, s.hidden), *q = behind(wide, widest), *narrow = behind(q, attended);
  Pages pages = s.pages;
  static thread_local std::vector<int32_t> lengths;
  lengths.assign(s.positions, s.positions + s.n);
  for (int32_t &length : lengths) length++;
  for (const Layer *w = layers; w < layers + count; w++) {
    add_rms_norm_of(w == layers ? x : part, w == layers ? (T *)nullptr : x, (const T *)w->input_norm, out, x, s.n,
                    s.hidden, s.eps);
    rope_and_write_of(apply(w->qkv, s, out, wide), (const T *)s.cos, (const T *)s.sin, s.positions, s.table,
                      s.row_of_table, &pages, (const T *)w->q_norm, (const T *)w->k_norm, q, s.n, s.heads, s.groups,
                      s.size, s.eps);
    paged_decode_of(q, &pages, s.table, s.row_of_table, lengths.data(), narrow, s.n, s.heads, s.groups, s.size,
                    w->window);
    apply(w->out, s, narrow, part);
    add_rms_norm_of(part, x, (const T *)w->post_norm, out, x, s.n, s.hidden, s.eps);
    silu_mul_of(apply(w->gate_up, s, out, wide), narrow, s.n, s.blocks, inner / s.blocks);
    apply(w->down, s, narrow, part);
    pages.keys = (T *)pages.keys + s.of_layer, pages.values = (T *)pages.values + s.of_layer;
  }
  add_rms_norm_of(part, x, (const T *)s.norm, out, x, s.n, s.hidden, s.eps);
}

extern "C" void decode(bool half, const Layer *layers, int64_t count, const Step *step, void *x, void *out,
                       void *memory) {
  FOR_BOTH(decode_of(layers, count, *step, (T *)x, (T *)out, (T *)memory))
}
