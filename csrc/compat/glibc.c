// What a newer glibc has and an older one lacks, for libraries that are linked against stubs of the older
// (TK_OLDEST_GLIBC, tools/link_stubs.py). Hidden: no other library in the process sees these.

#include <stddef.h>
#include <sys/stat.h>

#pragma GCC visibility push(hidden)

// glibc 2.32 has it to let std::shared_ptr leave out atomics in a program of one thread. 0: never leave them out.
char __libc_single_threaded = 0;

// Up to glibc 2.32 these were inline functions that call the following, which every glibc exports.
#pragma GCC visibility push(default)
extern int __xstat(int version, const char* path, struct stat* out);
extern int __lxstat(int version, const char* path, struct stat* out);
extern int __fxstat(int version, int file, struct stat* out);
extern int __fxstatat(int version, int folder, const char* path, struct stat* out, int flags);
#pragma GCC visibility pop

enum { kStatVersion = 1 };  // x86-64's only one

int stat(const char* path, struct stat* out) { return __xstat(kStatVersion, path, out); }
int lstat(const char* path, struct stat* out) { return __lxstat(kStatVersion, path, out); }
int fstat(int file, struct stat* out) { return __fxstat(kStatVersion, file, out); }
int fstatat(int folder, const char* path, struct stat* out, int flags) {
  return __fxstatat(kStatVersion, folder, path, out, flags);
}

#pragma GCC visibility pop
