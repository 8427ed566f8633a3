#ifndef WHALE_OPS_PORTABLE_OLDER_SYMBOLS_H_
#define WHALE_OPS_PORTABLE_OLDER_SYMBOLS_H_

// Included before every source of a portable build (`-include`), so that its libraries load with
// glibc 2.28 and the libstdc++ of GCC 8, whatever they are compiled with: names of which glibc and
// libstdc++ have several versions are bound to the old one. A name that a source does not use
// causes no dependency. Names without an old version are defined in runtime.cc.
//
// For x86-64. `whale_ops/build_wheel.py` checks the versions that the libraries need, and refuses
// newer ones.

#if defined(__cplusplus)
#include <cstddef>  // with it comes the configuration of libstdc++

// Waiting until a time of the steady clock would need functions of glibc 2.30; without these,
// libstdc++ waits by the system clock and then checks the steady one.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK
#endif

// Threads and dynamic loading moved into libc with glibc 2.34.
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");
__asm__(".symver dlclose, dlclose@GLIBC_2.2.5");
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(".symver pthread_once, pthread_once@GLIBC_2.2.5");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.12");
// Since glibc 2.29 these have versions without SVID error handling.
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver log2, log2@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
// void std::condition_variable::wait(std::unique_lock<std::mutex>&), which GCC 12 declares
// noexcept.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

#endif  // WHALE_OPS_PORTABLE_OLDER_SYMBOLS_H_
