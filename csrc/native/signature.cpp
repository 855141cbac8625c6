// Reading a signature: base64 to bytes, and counts of any width to uint32 with what their check
// needs. eldr/signature.py has the same in NumPy and says what an honest signature is.
#include <algorithm>

#include "buffers.h"
#include "clones.h"

namespace {

constexpr uint32_t kBad = 0xFF000000u;  // no character's value reaches these bits

// Values of characters, shifted to their place among a quad's 24 bits (first character highest).
struct Tables {
  uint32_t at[4][256];
  Tables() {
    const char* alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (auto& table : at)
      for (uint32_t& value : table) value = kBad;
    for (uint32_t v = 0; v < 64; ++v)
      for (int k = 0; k < 4; ++k) at[k][static_cast<uint8_t>(alphabet[v])] = v << (18 - 6 * k);
  }
};
const Tables tables;

// One quad of characters; kBad is set if one of them is not of the alphabet.
inline uint32_t quad(const uint8_t* in) {
  return tables.at[0][in[0]] | tables.at[1][in[1]] | tables.at[2][in[2]] | tables.at[3][in[3]];
}

// Decodes n characters, n a positive multiple of 4, into n / 4 * 3 - padding bytes; false if they
// are no base64.
bool decode(const uint8_t* in, int64_t n, int padding, uint8_t* out) {
  uint32_t seen = 0;
  const int64_t whole = padding != 0 ? n - 4 : n;
  for (int64_t i = 0; i < whole; i += 4, out += 3) {
    const uint32_t bits = quad(in + i);
    seen |= bits;
    out[0] = static_cast<uint8_t>(bits >> 16);
    out[1] = static_cast<uint8_t>(bits >> 8);
    out[2] = static_cast<uint8_t>(bits);
  }
  if (padding != 0) {
    uint8_t last[4] = {in[whole], in[whole + 1], in[whole + 2], 'A'};
    if (padding == 2) last[2] = 'A';
    const uint32_t bits = quad(last);
    seen |= bits;
    out[0] = static_cast<uint8_t>(bits >> 16);
    if (padding == 1) out[1] = static_cast<uint8_t>(bits >> 8);
  }
  return (seen & kBad) == 0;
}

// Widens one layer's counts; their sum, and in `peak` the largest so far.
template <typename T>
ELDR_CLONES uint64_t widen_row(const T* in, int64_t n, uint32_t* out, uint32_t* peak) {
  uint64_t sum = 0;
  uint32_t top = *peak;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t value = in[i];
    out[i] = value;
    sum += value;
    top = value > top ? value : top;
  }
  *peak = top;
  return sum;
}

template <typename T>
uint64_t widen_rows(const void* in, int64_t layers, int64_t n, uint32_t* out, uint32_t* peak) {
  uint64_t most = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const uint64_t sum =
        widen_row(static_cast<const T*>(in) + layer * n, n, out + layer * n, peak);
    most = sum > most ? sum : most;
  }
  return most;
}

constexpr uint8_t kFull = 255;  // a byte whose count goes on in the tail

// Adds the rest to those of one layer's counts that spill over; `tail` moves on. False if it ends too
// early, or if a count exceeds 32 bits.
bool spill_row(const uint8_t* in, int64_t n, const uint8_t** tail, const uint8_t* end,
               uint32_t* out, uint64_t* sum, uint32_t* peak) {
  const uint8_t* stop = in + n;
  for (const uint8_t* at = in;; ++at) {
    at = static_cast<const uint8_t*>(std::memchr(at, kFull, static_cast<size_t>(stop - at)));
    if (at == nullptr) return true;
    if (end - *tail < 4) return false;
    uint32_t over;
    std::memcpy(&over, *tail, sizeof over);
    *tail += sizeof over;
    if (over > UINT32_MAX - kFull) return false;
    out[at - in] += over;
    *sum += over;
    *peak = std::max(*peak, out[at - in]);
  }
}

// Bytes of all counts, then what exceeds them; false if the two do not fit together.
bool widen_spilled(const uint8_t* in, int64_t size, int64_t layers, int64_t n, uint32_t* out,
                   uint32_t* peak, uint64_t* most) {
  const uint8_t *tail = in + layers * n, *end = in + size;
  for (int64_t layer = 0; layer < layers; ++layer, in += n, out += n) {
    uint32_t top = 0;
    uint64_t sum = widen_row(in, n, out, &top);
    if (top == kFull && !spill_row(in, n, &tail, end, out, &sum, &top)) return false;
    *peak = std::max(*peak, top);
    *most = std::max(*most, sum);
  }
  return tail == end;
}

}  // namespace

namespace eldr {

PyObject* unbase64(PyObject*, PyObject* text) {
  Py_ssize_t n = 0;
  const char* chars = PyUnicode_AsUTF8AndSize(text, &n);
  if (chars == nullptr) return nullptr;
  const auto* in = reinterpret_cast<const uint8_t*>(chars);
  const int padding = n == 0 || in[n - 1] != '=' ? 0 : (n > 1 && in[n - 2] == '=' ? 2 : 1);
  if (n % 4 != 0) {
    PyErr_Format(PyExc_ValueError, "%zd characters of base64, not a multiple of 4", n);
    return nullptr;
  }
  PyObject* out = PyBytes_FromStringAndSize(nullptr, n / 4 * 3 - padding);
  if (out == nullptr || n == 0) return out;
  if (!decode(in, n, padding, reinterpret_cast<uint8_t*>(PyBytes_AsString(out)))) {
    Py_DecRef(out);
    PyErr_SetString(PyExc_ValueError, "not base64");
    return nullptr;
  }
  return out;
}

PyObject* unpack(PyObject*, PyObject* args) {
  PyObject *raw_o, *out_o;
  int width;
  long long layers;
  if (!PyArg_ParseTuple(args, "OiLO", &raw_o, &width, &layers, &out_o)) return nullptr;
  if (!PyBytes_Check(raw_o)) {  // whose contents are aligned for every width
    PyErr_SetString(PyExc_TypeError, "raw: expected bytes");
    return nullptr;
  }
  View<uint8_t> raw(raw_o, "raw");
  if (!raw.ok()) return nullptr;
  View<uint32_t, true> out(out_o, "out");
  if (!out.ok()) return nullptr;
  const int64_t cells = out.size();
  if (layers < 1 || cells < 1 || cells % layers != 0) {
    PyErr_Format(PyExc_ValueError, "unpack: %lld cells do not divide into %lld layers",
                 static_cast<long long>(cells), layers);
    return nullptr;
  }
  const int64_t n = cells / layers;
  uint32_t peak = 0;
  uint64_t most = 0;
  if (width == 0 && raw.size() >= cells) {
    if (!widen_spilled(raw.data(), raw.size(), layers, n, out.data(), &peak, &most)) {
      PyErr_SetString(PyExc_ValueError, "counts and what exceeds their bytes do not fit together");
      return nullptr;
    }
  } else if (!same_size("raw", raw.size(), width * cells)) {
    return nullptr;
  } else if (width == 1) {
    most = widen_rows<uint8_t>(raw.data(), layers, n, out.data(), &peak);
  } else if (width == 2) {
    most = widen_rows<uint16_t>(raw.data(), layers, n, out.data(), &peak);
  } else if (width == 4) {
    most = widen_rows<uint32_t>(raw.data(), layers, n, out.data(), &peak);
  } else {
    PyErr_Format(PyExc_ValueError, "unpack: width %d, expected 1, 2, 4 or 0", width);
    return nullptr;
  }
  return Py_BuildValue("(kK)", static_cast<unsigned long>(peak),
                       static_cast<unsigned long long>(most));
}

}  // namespace eldr
