// For portable builds: functions that compilers newer than GCC 8 expect in their own libstdc++, or
// in glibc 2.32. They are hidden, so that each library uses its own.

#include <new>

#define WHALE_HIDDEN __attribute__((visibility("hidden")))

// Whether the process has only one thread, so that reference counts need no atomic operations; part
// of glibc since 2.32.
extern "C" WHALE_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace whale::portable {

// The copy constructor and the destructor of std::exception_ptr, which every libstdc++ has.
void CopyPointer(void* to,
                 const void* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void DestroyPointer(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

// std::__throw_bad_array_new_length(), needed since GCC 11.
[[noreturn]] WHALE_HIDDEN void ThrowBadLength() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void ThrowBadLength() { throw std::bad_array_new_length(); }

// std::exception_ptr::_M_addref(), needed since GCC 12: implemented by a copy that is never
// destroyed.
WHALE_HIDDEN void AddReference(const void* self) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void AddReference(const void* self) {
  void* copy = nullptr;
  CopyPointer(&copy, self);
}

// std::exception_ptr::_M_release(), needed since GCC 12.
WHALE_HIDDEN void Release(void** self) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void Release(void** self) {
  DestroyPointer(self);
  *self = nullptr;
}

}  // namespace whale::portable
