// Declarations that the files of the module share.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <new>

namespace windlass {

using Address = std::uintptr_t;
template <class T>
T *at(Address address) {
    return reinterpret_cast<T *>(address);
}

// Kept between calls: a fresh allocation of this size is paid for in page faults. A vector that lies
// across two cache lines costs two accesses.
constexpr std::align_val_t ALIGNED{64};
struct Release {
    void operator()(float *floats) const { ::operator delete[](floats, ALIGNED); }
};
inline float *scratch_of(std::size_t floats) {
    thread_local std::unique_ptr<float[], Release> scratch;
    thread_local std::size_t size = 0;
    if (size < floats) {
        scratch.reset(static_cast<float *>(::operator new[](floats * sizeof(float), ALIGNED)));
        size = floats;
    }
    return scratch.get();
}

void bind_linear(nanobind::module_ &module);
void bind_watch(nanobind::module_ &module);

}  // namespace windlass
