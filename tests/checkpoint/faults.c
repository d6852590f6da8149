// A library that is loaded before libc: it counts the system calls on files below one folder, and fails one of them once.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[PATH_MAX], failed[PATH_MAX + 64];
static atomic_long count;
static long fail_at = -1;
static int fail_with;

void faults_arm(const char *folder, long number, int error) {  // number -1: count alone
  strncpy(root, folder, sizeof root - 1);
  failed[0] = 0, fail_at = number, fail_with = error;
  atomic_store(&count, 0);
}
long faults_disarm(void) {
  root[0] = 0;
  return atomic_load(&count);
}
const char *faults_failed(void) { return failed; }

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

static int fails(const char *call, const char *path) {
  if (!root[0] || !path || strncmp(path, root, strlen(root))) return 0;
  if (atomic_fetch_add(&count, 1) != fail_at) return 0;
  snprintf(failed, sizeof failed, "%s %s", call, path);
  errno = fail_with;
  return 1;
}
static const char *path_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < 0) return NULL;
  path[length] = 0;
  return path;
}
static int fails_fd(const char *call, int fd) {
  char path[PATH_MAX];
  int before = errno, result = root[0] ? fails(call, path_of(fd, path)) : 0;
  if (!result) errno = before;
  return result;
}
static int fails_at(const char *call, int fd, const char *name) {
  char path[2 * PATH_MAX];
  if (!root[0]) return 0;
  if (name[0] == '/' || fd == AT_FDCWD) return fails(call, name);
  if (!path_of(fd, path)) return 0;
  strcat(strcat(path, "/"), name);
  return fails(call, path);
}

#define BY_PATH(type, bad, name, params, path, args) \
  type name params { REAL(name); return fails(#name, path) ? bad : real args; }
#define BY_FD(type, bad, name, params, fd, args) \
  type name params { REAL(name); return fails_fd(#name, fd) ? bad : real args; }

BY_PATH(int, -1, stat64, (const char *path, struct stat64 *it), path, (path, it))
BY_PATH(int, -1, lstat64, (const char *path, struct stat64 *it), path, (path, it))
BY_PATH(int, -1, rename, (const char *path, const char *to), path, (path, to))
BY_PATH(int, -1, unlink, (const char *path), path, (path))
BY_PATH(int, -1, mkdir, (const char *path, mode_t mode), path, (path, mode))
BY_PATH(int, -1, rmdir, (const char *path), path, (path))
BY_PATH(int, -1, chmod, (const char *path, mode_t mode), path, (path, mode))
BY_PATH(int, -1, truncate64, (const char *path, off64_t length), path, (path, length))
BY_PATH(DIR *, NULL, opendir, (const char *path), path, (path))
BY_FD(DIR *, NULL, fdopendir, (int fd), fd, (fd))
BY_FD(int, -1, fstat64, (int fd, struct stat64 *it), fd, (fd, it))
BY_FD(int, -1, fsync, (int fd), fd, (fd))
BY_FD(int, -1, fdatasync, (int fd), fd, (fd))
BY_FD(int, -1, ftruncate64, (int fd, off64_t length), fd, (fd, length))
BY_FD(int, -1, flock, (int fd, int how), fd, (fd, how))
BY_FD(ssize_t, -1, read, (int fd, void *data, size_t size), fd, (fd, data, size))
BY_FD(off64_t, -1, lseek64, (int fd, off64_t to, int how), fd, (fd, to, how))

int fstatat64(int fd, const char *name, struct stat64 *it, int flags) {
  REAL(fstatat64);
  return fails_at("fstatat64", fd, name) ? -1 : real(fd, name, it, flags);
}
int unlinkat(int fd, const char *name, int flags) {
  REAL(unlinkat);
  return fails_at("unlinkat", fd, name) ? -1 : real(fd, name, flags);
}
struct dirent64 *readdir64(DIR *folder) {
  REAL(readdir64);
  return fails_fd("readdir64", dirfd(folder)) ? NULL : real(folder);
}
static mode_t mode_of(int flags, va_list list) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; }
int open64(const char *path, int flags, ...) {
  REAL(open64);
  va_list list;
  va_start(list, flags);
  mode_t mode = mode_of(flags, list);
  va_end(list);
  return fails("open64", path) ? -1 : real(path, flags, mode);
}
int openat64(int fd, const char *name, int flags, ...) {
  REAL(openat64);
  va_list list;
  va_start(list, flags);
  mode_t mode = mode_of(flags, list);
  va_end(list);
  return fails_at("openat64", fd, name) ? -1 : real(fd, name, flags, mode);
}
int open(const char *path, int flags, ...) {
  REAL(open);
  va_list list;
  va_start(list, flags);
  mode_t mode = mode_of(flags, list);
  va_end(list);
  return fails("open", path) ? -1 : real(path, flags, mode);
}
int openat(int fd, const char *name, int flags, ...) {
  REAL(openat);
  va_list list;
  va_start(list, flags);
  mode_t mode = mode_of(flags, list);
  va_end(list);
  return fails_at("openat", fd, name) ? -1 : real(fd, name, flags, mode);
}

// A write that fails may have left half of its bytes, and a file is closed even where closing fails.
ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  if (!fails_fd("write", fd)) return real(fd, data, size);
  if (fail_with != EINTR) real(fd, data, size / 2);
  errno = fail_with;
  return -1;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(pwrite64);
  if (!fails_fd("pwrite64", fd)) return real(fd, data, size, offset);
  if (fail_with != EINTR) real(fd, data, size / 2, offset);
  errno = fail_with;
  return -1;
}
int close(int fd) {
  REAL(close);
  if (!fails_fd("close", fd)) return real(fd);
  real(fd);
  errno = fail_with;
  return -1;
}
