// The row operators on the CPU, in one vectorised pass each. native.py builds and loads this file, cpu.py calls it.
//
//   row_stats   x [N, V] -> max, log_sum, mean, total [N]              one read of x, one exponential per element
//   row_grad    x [N, V], coefficients -> out [N, V] (or x itself)     one read, one write, one exponential per term
//
// What they compute is in docs/ops.md and, in plain torch, in reference.py. T is the compute type:
// double for double x, else float. A row is worked on in blocks that stay in the first-level cache: where x or out is of
// another type, or not contiguous along the vocabulary, a block goes through a buffer of T. No result depends on the
// number of threads, on strides or on whether out is x: blocks and segments are cut by column alone.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

template <typename T>
using Vec = at::vec::Vectorized<T>;

template <typename T>
constexpr T INF = std::numeric_limits<T>::infinity();
template <typename T>
constexpr T NaN = std::numeric_limits<T>::quiet_NaN();

template <typename T>
constexpr int64_t BLOCK = 16384 / sizeof(T); // elements; two such buffers fit in 32 KiB
constexpr int64_t SEGMENT = 32768; // columns of one task: of few long rows, every thread gets a share
constexpr int64_t TASK = 32768; // elements below which another thread does not pay, as in ATen

// ---- exponential ---------------------------------------------------------------------------------------------------

// Where exp(u) is 0 for u <= LOW<T>, and nothing overflows on the way.
template <typename T>
constexpr T LOW = std::is_same_v<T, double> ? T(-1000) : T(-87.33654);

// exp(HIGH<T>) is infinite.
template <typename T>
constexpr T HIGH = std::is_same_v<T, double> ? T(1000) : T(88.9);

#if defined(CPU_CAPABILITY_AVX512)
inline Vec<float> low_bits_as_exponent(Vec<float> t) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23));
}
#elif defined(CPU_CAPABILITY_AVX2)
inline Vec<float> low_bits_as_exponent(Vec<float> t) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
}
#else
inline Vec<float> low_bits_as_exponent(Vec<float> t) {
  uint32_t bits[Vec<float>::size()];
  t.store(bits);
  for (uint32_t& b : bits) b <<= 23;
  return Vec<float>::loadu(bits);
}
#endif

// M vectors that go through the same steps together: while one waits for its last step, another has its turn.
template <typename T, int M>
using Vecs = std::array<Vec<T>, M>;
constexpr int PAIR = 2; // more run out of registers

// exp(u) = fraction * power for LOW <= u < 89, NaN for NaN. Within 0.9 units in the last place.
//
// exp(u) = 2^(n - 1) * 2 exp(r), where n is u / ln 2 rounded and r = u - n ln 2, |r| <= ln 2 / 2. Adding 1.5 * 2^23 + 126
// rounds, and leaves n + 126 in the low bits, which become the exponent field of 2^(n - 1): 0 for n = -126, so that LOW
// gives 0 and no denormal number comes up on the way; infinity for n = 129. ln 2 is taken off in two parts, of which the
// first has so few bits that what is left (`near`) is exact. 2 exp(r) = 2 + 2 r + r^2 q(r), q of degree 4 and of least
// relative error (3e-9).
template <typename T, int M>
struct Exponentials {
  Vecs<T, M> fraction, power;

  Vec<T> value(int m) const { return fraction[m] * power[m]; }
};

template <int M>
C10_ALWAYS_INLINE Exponentials<float, M> exponentials(const Vecs<float, M>& u) {
  const Vec<float> magic(12582912.0f + 126.0f), log2e(1.44269504f);
  const auto each = [](const auto& step) {
    Vecs<float, M> found;
    for (int m = 0; m < M; ++m) found[m] = step(m);
    return found;
  };
  const auto t = each([&](int m) { return at::vec::fmadd(u[m], log2e, magic); });
  const auto n = each([&](int m) { return t[m] - magic; });
  const auto near = each([&](int m) { return at::vec::fmadd(n[m], Vec<float>(-0.693359375f), u[m]); });
  const auto r = each([&](int m) { return at::vec::fmadd(n[m], Vec<float>(0x1.bd0106p-13f), near[m]); });
  Vecs<float, M> value = each([](int) { return Vec<float>(0x1.6a23d0p-9f); });
  for (float next : {0x1.123a20p-6f, 0x1.5558f2p-4f, 0x1.555492p-2f, 0x1.fffffcp-1f, 2.0f, 2.0f})
    value = each([&](int m) { return at::vec::fmadd(value[m], r[m], Vec<float>(next)); });
  return {value, each([&](int m) { return low_bits_as_exponent(t[m]); })};
}

template <int M>
Exponentials<double, M> exponentials(const Vecs<double, M>& u) {
  Exponentials<double, M> found;
  for (int m = 0; m < M; ++m) found.fraction[m] = u[m].exp(), found.power[m] = Vec<double>(1);
  return found;
}

template <typename T>
Vec<T> exponential(Vec<T> u) {
  return exponentials<1>(Vecs<T, 1>{u}).value(0);
}

// From where exp(u) may be 0 for float32, and denormal for torch.
constexpr float DENORMAL = -86.9f;

// The same for any u below 89, with the denormal numbers too: there exp(u) is the square of exp(u / 2), until those end.
inline Vec<float> exponential_to_zero(Vec<float> u) {
  const Vec<float> normal = exponential(at::vec::clamp_min(u, Vec<float>(LOW<float>))), none(-104.0f);
  const Vec<float> root = exponential(at::vec::clamp_min(u, none) * Vec<float>(0.5f)) & (u > none);
  return Vec<float>::blendv(normal, root * root, u < Vec<float>(DENORMAL));
}

inline Vec<double> exponential_to_zero(Vec<double> u) {
  return u.exp();
}

// ---- rows, blocks --------------------------------------------------------------------------------------------------

enum Type : int64_t { FLOAT, DOUBLE, BFLOAT16, HALF };

// A tensor [..., V] of any strides, in elements.
struct Rows {
  char* data;
  int64_t type, item, dims;
  const int64_t* sizes;
  const int64_t* strides;

  Rows(void* pointer, int64_t type, int64_t dims, const int64_t* sizes, const int64_t* strides)
      : data(static_cast<char*>(pointer)), type(type),
        item(type == DOUBLE ? 8 : type == FLOAT ? 4 : 2), dims(dims), sizes(sizes), strides(strides) {}

  int64_t step() const { return strides[dims - 1]; }

  char* at(int64_t row, int64_t column) const {
    int64_t offset = column * step();
    for (int64_t d = dims - 2; d >= 0; row /= sizes[d--]) offset += row % sizes[d] * strides[d];
    return data + offset * item;
  }

  template <typename T>
  bool direct() const {
    return step() == 1 && type == (std::is_same_v<T, double> ? DOUBLE : FLOAT);
  }
};

template <typename X, typename T>
void load(const char* data, int64_t step, int64_t n, T* to) {
  const X* x = reinterpret_cast<const X*>(data);
  int64_t i = 0;
  if constexpr (at::vec::is_reduced_floating_point_v<X>) {
    for (; step == 1 && i + Vec<X>::size() <= n; i += Vec<X>::size()) {
      auto [low, high] = at::vec::convert_to_float<X>(Vec<X>::loadu(x + i));
      low.store(to + i);
      high.store(to + i + Vec<float>::size());
    }
  }
  for (; i < n; ++i) to[i] = static_cast<T>(x[i * step]);
}

template <typename X, typename T>
void store(const T* from, char* data, int64_t step, int64_t n) {
  X* x = reinterpret_cast<X*>(data);
  int64_t i = 0;
  if constexpr (at::vec::is_reduced_floating_point_v<X> && std::is_same_v<T, float>) {
    for (; step == 1 && i + Vec<X>::size() <= n; i += Vec<X>::size()) {
      auto low = Vec<float>::loadu(from + i), high = Vec<float>::loadu(from + i + Vec<float>::size());
      at::vec::convert_from_float<X>(low, high).store(x + i);
    }
  }
  for (; i < n; ++i) x[i * step] = static_cast<X>(from[i]);
}

template <typename T>
void load(const Rows& x, const char* data, int64_t n, T* to) {
  switch (x.type) {
    case FLOAT: return load<float>(data, x.step(), n, to);
    case DOUBLE: return load<double>(data, x.step(), n, to);
    case BFLOAT16: return load<at::BFloat16>(data, x.step(), n, to);
    default: return load<at::Half>(data, x.step(), n, to);
  }
}

template <typename T>
void store(const T* from, const Rows& x, char* data, int64_t n) {
  switch (x.type) {
    case FLOAT: return store<float>(from, data, x.step(), n);
    case DOUBLE: return store<double>(from, data, x.step(), n);
    case BFLOAT16: return store<at::BFloat16>(from, data, x.step(), n);
    default: return store<at::Half>(from, data, x.step(), n);
  }
}

// Calls task(row, begin, end) for every segment [begin, end) of every row, in torch's threads.
template <typename Task>
void for_each_segment(int64_t rows, int64_t vocab, const Task& task) {
  const int64_t parts = at::divup(vocab, SEGMENT), length = std::min(vocab, SEGMENT);
  at::parallel_for(0, rows * parts, at::divup(TASK, length), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % parts * SEGMENT;
      task(i / parts, begin, std::min(vocab, begin + SEGMENT));
    }
  });
}

// ---- row_stats -----------------------------------------------------------------------------------------------------

// What is known of some elements u of a row (x, or -x where the scale is negative), relative to anchor = top, or 0 where
// top is -inf; rate is the size of the scale, d = rate (u - anchor):
//   mass = sum exp(d)    first = sum exp(d) d    spread = sum d
// top drops NaN; mass is NaN where an element is NaN or +inf, and nowhere else.
struct Sums {
  double top = -INF<double>, rate = 1, mass = 0, first = 0, spread = 0, count = 0;

  double anchor() const { return top == -INF<double> ? 0.0 : top; }

  // The same with respect to a top that is no smaller; step = old anchor - new anchor changes every difference by it.
  void raise(double to) {
    if (to == top) return;
    Sums raised = *this;
    raised.top = to;
    const double step = rate * (anchor() - raised.anchor()), decay = top == -INF<double> ? 0.0 : std::exp(step);
    first = decay == 0 ? mass * 0 : decay * (first + mass * step);
    mass *= decay;
    spread += count * step;
    top = to;
  }

  void add(Sums other) {
    const double to = std::max(top, other.top);
    raise(to);
    other.raise(to);
    mass += other.mass;
    first += other.first;
    spread += other.spread;
    count += other.count;
  }
};

constexpr int AHEAD = 4; // independent sums, so that an addition need not wait for the one before
constexpr int64_t STRIP = 16; // elements that a lane adds up one by one

// A sum in two steps: of a strip in every lane, then of strips. An element is rounded 16 + 128 / 16 times in a block of
// vectors of 8 floats or 4 doubles, where one sum would round it 128 times: of a row with one large probability that is
// most of the error. Over the lanes in double: where few elements make up the sum, these would be its largest roundings.
template <typename T>
struct Sum {
  Vec<T> strip[AHEAD], strips[AHEAD];

  Sum() { for (int k = 0; k < AHEAD; ++k) strip[k] = strips[k] = Vec<T>(0); }

  void end_strip() {
    for (int k = 0; k < AHEAD; ++k) {
      strips[k] = strips[k] + strip[k];
      strip[k] = Vec<T>(0);
    }
  }

  double total() {
    constexpr int64_t W = Vec<T>::size();
    end_strip();
    T lanes[AHEAD * W];
    for (int k = 0; k < AHEAD; ++k) strips[k].store(lanes + k * W);
    double sums[AHEAD] = {};
    for (int64_t i = 0; i < W; ++i)
      for (int k = 0; k < AHEAD; ++k) sums[k] += lanes[k * W + i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
};

template <typename T>
T top_of(const T* x, int64_t n, T sign) {
  constexpr int64_t W = Vec<T>::size();
  const Vec<T> scale(sign);
  Vec<T> top[AHEAD];
  for (Vec<T>& t : top) t = Vec<T>(-INF<T>);
  int64_t i = 0;
  for (; i + AHEAD * W <= n; i += AHEAD * W)
    for (int k = 0; k < AHEAD; ++k) top[k] = at::vec::clamp_min(Vec<T>::loadu(x + i + k * W) * scale, top[k]);
  for (; i < n; i += W) {
    const int64_t here = std::min(W, n - i);
    const Vec<T> u = Vec<T>::loadu(x + i, here) * scale;
    top[0] = at::vec::clamp_min(Vec<T>::set(Vec<T>(-INF<T>), u, here), top[0]);
  }
  T lanes[AHEAD * W], highest = -INF<T>;
  for (int k = 0; k < AHEAD; ++k) top[k].store(lanes + k * W);
  for (T lane : lanes) highest = lane > highest ? lane : highest;
  return highest;
}

// What a block is followed by, which is fetched while the exponentials of the block are computed: the look for its
// largest or least element would have to wait for it. A vector's worth of elements has `bytes`, 0: nothing is fetched.
struct Next {
  const char* data;
  int64_t bytes;

  void fetch(int64_t vector) const {
#if defined(__GNUC__)
    if (bytes) __builtin_prefetch(data + vector * bytes);
#endif
  }
};

// UNIT: the scale is 1.
template <typename T, bool UNIT, bool MEAN, bool TOTAL>
Sums block_sums(const T* x, int64_t n, T scale_of_row, Next next) {
  constexpr int64_t W = Vec<T>::size();
  const T sign = scale_of_row < 0 ? T(-1) : T(1);
  Sums sums;
  sums.rate = sign * scale_of_row;
  sums.top = top_of(x, n, sign);
  sums.count = n;
  const Vec<T> scale(scale_of_row), anchor(sign * static_cast<T>(sums.anchor())), low(LOW<T>), none(0);
  const auto difference = [&](Vec<T> v) { return UNIT ? v - anchor : (v - anchor) * scale; };
  Sum<T> mass, first, spread;
  int64_t i = 0;
  const auto end_strip = [&] {
    mass.end_strip();
    if constexpr (MEAN) first.end_strip();
    if constexpr (TOTAL) spread.end_strip();
  };
  while (i + AHEAD * W <= n) {
    const int64_t end = std::min(n, i + STRIP * AHEAD * W);
    for (; i + AHEAD * W <= end; i += AHEAD * W) {
      for (int k = 0; k < AHEAD; k += PAIR) {
        Vecs<T, PAIR> d, held;
        for (int m = 0; m < PAIR; ++m) d[m] = difference(Vec<T>::loadu(x + i + (k + m) * W));
        for (int m = 0; m < PAIR; ++m) held[m] = at::vec::clamp_min(d[m], low);
        const auto e = exponentials<PAIR>(held);
        for (int m = 0; m < PAIR; ++m) {
          next.fetch(i / W + k + m);
          mass.strip[k + m] = at::vec::fmadd(e.fraction[m], e.power[m], mass.strip[k + m]);
          if constexpr (MEAN) first.strip[k + m] = at::vec::fmadd(e.value(m), held[m], first.strip[k + m]);
          if constexpr (TOTAL) spread.strip[k + m] = spread.strip[k + m] + d[m];
        }
      }
    }
    end_strip();
  }
  for (; i < n; i += W) {
    const int64_t here = std::min(W, n - i);
    const Vec<T> d = Vec<T>::set(none, difference(Vec<T>::loadu(x + i, here)), here);
    const Vec<T> held = at::vec::clamp_min(d, low), e = Vec<T>::set(none, exponential(held), here);
    mass.strip[0] = mass.strip[0] + e;
    if constexpr (MEAN) first.strip[0] = at::vec::fmadd(e, held, first.strip[0]);
    if constexpr (TOTAL) spread.strip[0] = spread.strip[0] + d;
  }
  sums.mass = mass.total();
  if constexpr (MEAN) sums.first = first.total();
  if constexpr (TOTAL) sums.spread = spread.total();
  return sums;
}

template <typename T, bool UNIT>
auto block_sums_of(bool mean, bool total) {
  if (total) return block_sums<T, UNIT, true, true>;
  return mean ? block_sums<T, UNIT, true, false> : block_sums<T, UNIT, false, false>;
}

template <typename T>
Sums segment_sums(const Rows& x, int64_t row, int64_t begin, int64_t end, T scale, bool mean, bool total) {
  alignas(64) T buffer[BLOCK<T>];
  Sums sums;
  sums.rate = std::abs(scale);
  if (scale == 0) { // a row of zeros, whatever x is
    sums.top = 0;
    sums.mass = sums.count = static_cast<double>(end - begin);
    return sums;
  }
  const auto block = scale == 1 ? block_sums_of<T, true>(mean, total) : block_sums_of<T, false>(mean, total);
  for (int64_t column = begin; column < end; column += BLOCK<T>) {
    const int64_t n = std::min(BLOCK<T>, end - column);
    const char* data = x.at(row, column);
    if (!x.direct<T>()) load(x, data, n, buffer);
    const Next next{data + n * x.item, x.step() == 1 ? Vec<T>::size() * x.item : 0};
    sums.add(block(x.direct<T>() ? reinterpret_cast<const T*>(data) : buffer, n, scale, next));
  }
  return sums;
}

// Of a row with NaN or +inf once it is scaled: which of the two.
template <typename T>
T top_of_bad_row(const Rows& x, int64_t row, int64_t vocab, T scale) {
  T buffer[BLOCK<T>];
  for (int64_t column = 0; column < vocab; column += BLOCK<T>) {
    const int64_t n = std::min(BLOCK<T>, vocab - column);
    load(x, x.at(row, column), n, buffer);
    for (int64_t i = 0; i < n; ++i)
      if (std::isnan(buffer[i] * scale)) return NaN<T>;
  }
  return INF<T>;
}

template <typename T>
struct Stats {
  T *peak, *log_sum, *mean, *total; // [N] each
  bool with_mean, with_total; // NaN otherwise
};

template <typename T>
void finish(const Sums& sums, int64_t row, bool flipped, const Stats<T>& out) {
  const bool bad = std::isnan(sums.mass), empty = !bad && sums.top == -INF<double>;
  out.peak[row] = static_cast<T>(flipped ? -sums.top : sums.top);
  out.log_sum[row] = bad ? NaN<T> : empty ? -INF<T> : static_cast<T>(std::log(sums.mass));
  out.mean[row] = bad || empty || !out.with_mean ? NaN<T> : static_cast<T>(sums.first / sums.mass);
  out.total[row] = bad || empty || !out.with_total ? NaN<T> : static_cast<T>(sums.spread);
}

template <typename T>
void row_stats_of(const Rows& x, int64_t rows, int64_t vocab, const T* scale, T factor, const Stats<T>& out) {
  const int64_t parts = at::divup(vocab, SEGMENT);
  std::vector<Sums> found(rows * parts);
  const auto scale_of = [&](int64_t row) { return scale ? scale[row] : factor; };
  for_each_segment(rows, vocab, [&](int64_t row, int64_t begin, int64_t end) {
    found[row * parts + begin / SEGMENT] =
        segment_sums<T>(x, row, begin, end, scale_of(row), out.with_mean, out.with_total);
  });
  for (int64_t row = 0; row < rows; ++row) {
    Sums sums = found[row * parts];
    for (int64_t part = 1; part < parts; ++part) sums.add(found[row * parts + part]);
    if (std::isnan(sums.mass)) sums.top = top_of_bad_row<T>(x, row, vocab, scale_of(row));
    finish(sums, row, scale_of(row) < 0, out);
  }
}

// ---- row_grad ------------------------------------------------------------------------------------------------------

template <typename T>
struct Term {
  T scale, center, shift, a, b;
};

template <typename T>
struct Coefficients {
  int64_t terms_count, hots_count;
  const Term<T>* terms; // [K] of one row
  const T* affine; // [3]: f, center, e
  const int64_t* index; // [M]
  const T* weight; // [M]
  bool softmax;

  Coefficients of_row(int64_t row) const {
    return {terms_count, hots_count, terms + row * terms_count, affine + row * 3, index + row * hots_count,
            weight + row * hots_count, softmax};
  }

  // Whether all of a, b, f, e and the weights are 0.
  bool empty() const {
    bool zero = affine[0] == 0 && affine[2] == 0;
    for (int64_t k = 0; k < terms_count; ++k) zero = zero && terms[k].a == 0 && terms[k].b == 0;
    for (int64_t k = 0; k < hots_count; ++k) zero = zero && weight[k] == 0;
    return zero;
  }
};

// What the coefficients of a row are, as far as the code for a block differs.
enum class Kind {
  LEVEL, // one term with a softmax and no z beside it, nothing affine: what a loss of log-probs comes to
  PLAIN, // the same, z beside it: with an entropy
  ANY,
  DENORMALS, // any, of exponentials that may be denormal
  SOFTMAX, // any, where x is a softmax
};

template <typename T>
bool is_plain(const Coefficients<T>& of) {
  if (of.terms_count != 1 || of.affine[0] != 0 || of.affine[2] != 0) return false;
  const Term<T>& term = *of.terms;
  return term.scale != 0 && !std::isnan(term.shift) && (term.a != 0 || term.b != 0);
}

// Where z is -inf, exp(z - shift) a is 0 by itself.
template <typename T>
bool is_level(const Coefficients<T>& of) {
  return is_plain(of) && of.terms->b == 0 && std::isfinite(of.terms->a) && std::isfinite(of.terms->shift);
}

// exp(z - shift) (a + b z), z = scale (x - center); 0 where z is -inf, unless the shift says that there is no softmax.
// x is not looked at where the scale is 0, nor anything where a and b are.
template <typename T, Kind KIND, int M>
C10_ALWAYS_INLINE Vecs<T, M> term_values(const Vecs<T, M>& x, const Term<T>& term) {
  constexpr bool plain = KIND == Kind::PLAIN, denormals = KIND == Kind::DENORMALS;
  Vecs<T, M> z, u, value;
  value.fill(Vec<T>(0));
  if (!plain && term.a == 0 && term.b == 0) return value;
  for (int m = 0; m < M; ++m) {
    z[m] = !plain && term.scale == 0 ? Vec<T>(0) : (x[m] - Vec<T>(term.center)) * Vec<T>(term.scale);
    u[m] = at::vec::clamp_max(z[m] - Vec<T>(term.shift), Vec<T>(HIGH<T>));
    if (!denormals) u[m] = at::vec::clamp_min(u[m], Vec<T>(LOW<T>));
  }
  const auto e = exponentials<M>(u);
  for (int m = 0; m < M; ++m) {
    const Vec<T> exponential = denormals ? exponential_to_zero(u[m]) : e.value(m);
    value[m] = exponential * at::vec::fmadd(z[m], Vec<T>(term.b), Vec<T>(term.a));
    if (plain || !std::isnan(term.shift)) value[m] = Vec<T>::blendv(value[m], Vec<T>(0), z[m] == Vec<T>(-INF<T>));
  }
  return value;
}

// exp(z - shift) a.
template <typename T, int M>
C10_ALWAYS_INLINE Vecs<T, M> level_values(const Vecs<T, M>& x, const Term<T>& term) {
  const Vec<T> center(term.center), scale(term.scale), shift(term.shift), a(term.a), low(LOW<T>), high(HIGH<T>);
  Vecs<T, M> u;
  for (int m = 0; m < M; ++m) u[m] = at::vec::clamp(at::vec::fmsub(x[m] - center, scale, shift), low, high);
  const auto e = exponentials<M>(u);
  for (int m = 0; m < M; ++m) u[m] = e.value(m) * a;
  return u;
}

// What `term_values` are of x = exp(z - shift); 0 where x is 0.
template <typename T, int M>
Vecs<T, M> softmax_values(const Vecs<T, M>& x, const Term<T>& term) {
  Vecs<T, M> value;
  value.fill(Vec<T>(0));
  if (term.a == 0 && term.b == 0) return value;
  for (int m = 0; m < M; ++m) {
    const Vec<T> z = x[m].log() + Vec<T>(term.shift);
    const Vec<T> all = x[m] * at::vec::fmadd(z, Vec<T>(term.b), Vec<T>(term.a));
    value[m] = Vec<T>::blendv(all, Vec<T>(0), x[m] == Vec<T>(0));
  }
  return value;
}

// Whether the exponentials have nothing beside them: a softmax, whose logarithm may be taken. Then denormal ones count. In
// the gradient of a loss, with its one-hot terms, nobody can tell them from 0.
template <typename T>
bool counts_denormals(const Coefficients<T>& of) {
  return !std::is_same_v<T, double> && !of.hots_count && of.affine[0] == 0 && of.affine[2] == 0;
}

// Whether a block has exponentials that may be denormal, if they count.
template <typename T>
bool has_denormals(const T* x, int64_t n, const Coefficients<T>& of) {
  bool found = false;
  for (int64_t k = 0; counts_denormals(of) && k < of.terms_count && !found; ++k) {
    const Term<T>& term = of.terms[k];
    const T sign = term.scale < 0 ? T(1) : T(-1);
    found = term.scale != 0 && (sign * top_of(x, n, sign) - term.center) * term.scale - term.shift < T(DENORMAL);
  }
  return found;
}

// The coefficients of one row, less the one-hot terms. The first term and what is affine are copies, which writing to out
// cannot change.
template <typename T, Kind KIND>
struct Dense {
  const int64_t count;
  const Term<T> first;
  const Term<T>* terms;
  const T factor, center, e;

  explicit Dense(const Coefficients<T>& of)
      : count(of.terms_count), first(count ? of.terms[0] : Term<T>{}), terms(of.terms), factor(of.affine[0]),
        center(of.affine[1]), e(of.affine[2]) {}

  static constexpr bool ONE = KIND == Kind::LEVEL || KIND == Kind::PLAIN; // term, and nothing else

  bool has_affine() const { return !ONE && (factor != 0 || e != 0); }

  template <int M>
  C10_ALWAYS_INLINE Vecs<T, M> exponential_terms(const Vecs<T, M>& x) const {
    if constexpr (KIND == Kind::LEVEL) return level_values<T, M>(x, first);
    if constexpr (KIND == Kind::SOFTMAX) return softmax_values<T, M>(x, first);
    Vecs<T, M> sum = term_values<T, KIND, M>(x, first);
    for (int64_t k = 1; !ONE && k < count; ++k) {
      const auto value = term_values<T, KIND, M>(x, terms[k]);
      for (int m = 0; m < M; ++m) sum[m] = sum[m] + value[m];
    }
    return sum;
  }

  // What is affine in x, which is not looked at where the factor is 0.
  Vec<T> affine_term(Vec<T> x) const {
    return factor != 0 ? Vec<T>(factor) * (x - Vec<T>(center)) + Vec<T>(e) : Vec<T>(e);
  }

  template <int M>
  C10_ALWAYS_INLINE Vecs<T, M> values(const Vecs<T, M>& x) const {
    Vecs<T, M> found = exponential_terms<M>(x);
    for (int m = 0; !ONE && m < M; ++m) found[m] = found[m] + affine_term(x[m]);
    return found;
  }

  // Of a block. out may be x.
  void write(const T* x, T* out, int64_t n, Next next) const {
    constexpr int64_t W = Vec<T>::size();
    const Dense of = *this;
    int64_t i = 0;
    for (; i + PAIR * W <= n; i += PAIR * W) {
      Vecs<T, PAIR> given;
      for (int m = 0; m < PAIR; ++m) {
        given[m] = Vec<T>::loadu(x + i + m * W);
        next.fetch(i / W + m);
      }
      const auto found = of.template values<PAIR>(given);
      for (int m = 0; m < PAIR; ++m) found[m].store(out + i + m * W);
    }
    for (; i < n; i += W) {
      const int64_t here = std::min(W, n - i);
      values<1>({Vec<T>::loadu(x + i, here)})[0].store(out + i, here);
    }
  }
};

// A block of one row, from `column` on. One-hot weights are added to the exponentials first: p - 1 cancels in a row whose
// token is certain, and what is affine would be rounded as 1 is.
template <typename T, Kind KIND>
void block_grad_of(const T* x, T* out, int64_t n, int64_t column, const Coefficients<T>& of, Next next) {
  const auto within = [&](int64_t k) { return of.index[k] >= column && of.index[k] < column + n; };
  const Dense<T, KIND> dense(of);
  const bool affine = dense.has_affine();
  std::vector<T> sums, rest; // of the one-hot columns, read before they are written
  for (int64_t k = 0; k < (affine ? of.hots_count : 0); ++k)
    if (within(k)) {
      const Vec<T> v = Vec<T>::loadu(x + (of.index[k] - column), 1);
      dense.template exponential_terms<1>({v})[0].store(&sums.emplace_back(), 1);
      dense.affine_term(v).store(&rest.emplace_back(), 1);
    }
  dense.write(x, out, n, next);
  for (int64_t k = 0, found = 0; k < of.hots_count; ++k)
    if (within(k)) {
      T& to = out[of.index[k] - column];
      if (!affine) {
        to += of.weight[k];
        continue;
      }
      T sum = sums[found];
      for (int64_t other = 0; other < of.hots_count; ++other)
        if (of.index[other] == of.index[k]) sum += of.weight[other];
      to = sum + rest[found++];
    }
}

template <typename T>
void block_grad(const T* x, T* out, int64_t n, int64_t column, const Coefficients<T>& of, Next next) {
  if (of.softmax) block_grad_of<T, Kind::SOFTMAX>(x, out, n, column, of, next);
  else if (has_denormals(x, n, of)) block_grad_of<T, Kind::DENORMALS>(x, out, n, column, of, next);
  else if (is_level(of)) block_grad_of<T, Kind::LEVEL>(x, out, n, column, of, next);
  else if (is_plain(of)) block_grad_of<T, Kind::PLAIN>(x, out, n, column, of, next);
  else block_grad_of<T, Kind::ANY>(x, out, n, column, of, next);
}

template <typename T>
void segment_grad(const Rows& x, const Rows& out, int64_t row, int64_t begin, int64_t end, const Coefficients<T>& of) {
  alignas(64) T buffer[BLOCK<T>];
  const bool empty = of.empty();
  if (empty) std::fill(buffer, buffer + BLOCK<T>, T(0));
  for (int64_t column = begin; column < end; column += BLOCK<T>) {
    const int64_t n = std::min(BLOCK<T>, end - column);
    char* to = out.at(row, column);
    if (empty) {
      store(buffer, out, to, n);
      continue;
    }
    const char* from = x.at(row, column);
    if (!x.direct<T>()) load(x, from, n, buffer);
    T* result = out.direct<T>() ? reinterpret_cast<T*>(to) : buffer;
    const Next next{from + n * x.item, x.step() == 1 && counts_denormals(of) ? Vec<T>::size() * x.item : 0};
    block_grad(x.direct<T>() ? reinterpret_cast<const T*>(from) : buffer, result, n, column, of, next);
    if (result == buffer) store(buffer, out, to, n);
  }
}

// A result this large is memory fresh from the system, every time: glibc hands larger blocks back when they are freed.
// In pages of 4 KiB their first touch took four times as long as the gradient.
void use_large_pages(char* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  // Only a hint: a system without such pages refuses it, and nothing is lost.
  if (bytes >= (32 << 20)) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <typename T>
void row_grad_of(const Rows& x, const Rows& out, int64_t rows, int64_t vocab, const Coefficients<T>& of) {
  for_each_segment(rows, vocab, [&](int64_t row, int64_t begin, int64_t end) {
    segment_grad<T>(x, out, row, begin, end, of.of_row(row));
  });
}

} // namespace

// ---- called from native.py -----------------------------------------------------------------------------------------
//
// shape: the sizes of x, then its strides (then those of out), `dims` each, the vocabulary last. types: see `Type`.
// Everything else is contiguous, in the compute type; N * V is not 0.

static int64_t rows_of(int64_t dims, const int64_t* sizes) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < dims; ++d) rows *= sizes[d];
  return rows;
}

extern "C" void slime_row_stats(
    void* x, int64_t type, int64_t dims, const int64_t* shape, // [..., V], read only
    const void* scale, double factor, // [N], or null for `factor`
    void* peak, void* log_sum, void* mean, void* total, // [N], written
    int64_t with_mean, int64_t with_total) {
  const Rows view(x, type, dims, shape, shape + dims);
  const int64_t rows = rows_of(dims, shape), vocab = shape[dims - 1];
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const auto as = [](void* p) { return static_cast<T*>(p); };
    const Stats<T> out{as(peak), as(log_sum), as(mean), as(total), with_mean != 0, with_total != 0};
    row_stats_of<T>(view, rows, vocab, static_cast<const T*>(scale), static_cast<T>(factor), out);
  };
  type == DOUBLE ? run(double()) : run(float());
}

extern "C" void slime_row_grad(
    void* x, int64_t type, void* out, int64_t out_type, int64_t dims, const int64_t* shape, // [..., V] each
    const void* terms, int64_t terms_count, const void* affine, // [N, K, 5], [N, 3]
    const int64_t* index, const void* weight, int64_t hots_count, int64_t softmax) { // [N, M] each
  const Rows from(x, type, dims, shape, shape + dims), to(out, out_type, dims, shape, shape + 2 * dims);
  const int64_t rows = rows_of(dims, shape), vocab = shape[dims - 1];
  if (out != x) use_large_pages(to.data, rows * vocab * to.item);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const Coefficients<T> of{terms_count, hots_count, static_cast<const Term<T>*>(terms), static_cast<const T*>(affine),
                             index, static_cast<const T*>(weight), softmax != 0};
    row_grad_of<T>(from, to, rows, vocab, of);
  };
  type == DOUBLE ? run(double()) : run(float());
}
