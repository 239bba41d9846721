// Memory of the device and pinned memory: two ranges of addresses of the host.
#include "emulator.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

namespace emulated {

static constexpr size_t GIB = size_t(1) << 30;
static constexpr size_t MIB = size_t(1) << 20;
static constexpr size_t PAGE = 4096;

// Larger ones are counted and not done: they would make the host's memory out of pages that nobody
// has touched.
static constexpr size_t LARGEST_DEVICE_COPY = MIB;
static constexpr size_t LARGEST_HOST_COPY = 256 * MIB;
static constexpr size_t LARGEST_MEMSET = 16 * MIB;

static size_t limit_from_environment() {
  const char* text = getenv("CUDA_EMULATOR_GIB");
  double gib = text ? atof(text) : 79;
  if (gib <= 0) {
    fprintf(stderr, "cuda_emulator: CUDA_EMULATOR_GIB=%s is no size\n", text);
    abort();
  }
  return size_t(gib * double(GIB));
}

static const bool ones = getenv("CUDA_EMULATOR_ONES") != nullptr;
static const bool zeros = getenv("CUDA_EMULATOR_ZEROS") != nullptr;

// Addresses that are handed out once only, so that a pointer tells what it points to. A page costs
// nothing until it is written.
class Range {
 public:
  explicit Range(size_t bytes) : bytes_(bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapped == MAP_FAILED) {
      perror("cuda_emulator: mmap");
      abort();
    }
    start_ = next_ = static_cast<char*>(mapped);
  }

  void* take(size_t bytes) {
    size_t whole = (bytes + PAGE - 1) / PAGE * PAGE;
    if (whole > size_t(start_ + bytes_ - next_)) return nullptr;
    void* result = next_;
    next_ += whole;
    live_[result] = bytes;
    return result;
  }

  // Returns how many bytes were freed: 0 for what was not taken here.
  size_t give_back(void* pointer) {
    auto found = live_.find(pointer);
    if (found == live_.end()) return 0;
    size_t bytes = found->second;
    if (bytes) madvise(pointer, bytes, MADV_DONTNEED);
    live_.erase(found);
    return bytes;
  }

  bool contains(const void* pointer) const {
    return pointer >= start_ && pointer < start_ + bytes_;
  }

 private:
  size_t bytes_;
  char* start_;
  char* next_;
  std::map<void*, size_t> live_;
};

static Range& device() {
  static auto* made = new Range(4096 * GIB);
  return *made;
}

static Range& pinned() {
  static auto* made = new Range(256 * GIB);
  return *made;
}

static size_t used = 0;
static size_t peak = 0;
static auto& registered = *new std::map<const char*, size_t>();  // by cudaHostRegister

size_t device_limit() {
  static const size_t limit = limit_from_environment();
  return limit;
}

size_t device_used() { return used; }

void* allocate_device(size_t bytes) {
  Lock lock(mutex);
  if (bytes > device_limit() - used) return nullptr;
  void* pointer = device().take(bytes);
  if (pointer == nullptr) return nullptr;
  used += bytes;
  if (used > peak) peak = used;
  return pointer;
}

void free_device(void* pointer) {
  Lock lock(mutex);
  used -= device().give_back(pointer);
}

void* allocate_pinned(size_t bytes) {
  Lock lock(mutex);
  return pinned().take(bytes);
}

void free_pinned(void* pointer) {
  Lock lock(mutex);
  pinned().give_back(pointer);
}

void register_pinned(void* pointer, size_t bytes) {
  Lock lock(mutex);
  registered[static_cast<char*>(pointer)] = bytes;
}

void unregister_pinned(void* pointer) {
  Lock lock(mutex);
  registered.erase(static_cast<char*>(pointer));
}

bool is_device(const void* pointer) { return device().contains(pointer); }

bool is_pinned(const void* pointer) {
  if (pinned().contains(pointer)) return true;
  Lock lock(mutex);
  auto* address = static_cast<const char*>(pointer);
  auto after = registered.upper_bound(address);
  if (after == registered.begin()) return false;
  --after;
  return address < after->first + after->second;
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  bool reads = is_device(from) && !is_device(to);
  if (ones && reads && bytes == 4) {
    const float one = 1;
    int word;
    memcpy(&word, from, 4);
    memcpy(to, word ? from : static_cast<const void*>(&one), 4);
    return;
  }
  if (zeros && reads && bytes <= 8) {
    memset(to, 0, bytes);
    return;
  }
  bool within = is_device(from) && is_device(to);
  if (bytes <= (within ? LARGEST_DEVICE_COPY : LARGEST_HOST_COPY)) memmove(to, from, bytes);
}

void set_bytes(void* to, int value, size_t bytes) {
  if (bytes <= LARGEST_MEMSET) memset(to, value, bytes);
}

}  // namespace emulated

using namespace emulated;

// Bytes of the device: in use, most in use, all there are.
EXPORT void cuda_emulator_memory(size_t* result) {
  Lock lock(emulated::mutex);
  result[0] = used;
  result[1] = peak;
  result[2] = device_limit();
}
