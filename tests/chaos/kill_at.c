/* Kills the process with SIGKILL at its n-th change of a file: before it, or in the middle of a write.
   Loaded before a program's other libraries (LD_PRELOAD); `kill_at` begins to count, `changes` returns the number. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long counted = 0, last = 0;

/* 0: count only. */
void kill_at(long number) {
    counted = 0;
    last = number;
}

long changes(void) { return counted; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int due(void) { return ++counted == last; }

static void change(void) {
    if (due()) die();
}

/* Half of the bytes of every second write that kills are written. */
static size_t half(int fd, size_t bytes) {
    struct stat is;
    if (fstat(fd, &is) || !S_ISREG(is.st_mode) || !due()) return 0;
    if (last % 2 || bytes < 2) die();
    return bytes / 2;
}

ssize_t write(int fd, const void *from, size_t bytes) {
    size_t part = half(fd, bytes);
    if (part) {
        syscall(SYS_write, fd, from, part);
        die();
    }
    return syscall(SYS_write, fd, from, bytes);
}

static ssize_t at(int fd, const void *from, size_t bytes, off_t place) {
    size_t part = half(fd, bytes);
    if (part) {
        syscall(SYS_pwrite64, fd, from, part, place);
        die();
    }
    return syscall(SYS_pwrite64, fd, from, bytes, place);
}

ssize_t pwrite(int fd, const void *from, size_t bytes, off_t place) { return at(fd, from, bytes, place); }
ssize_t pwrite64(int fd, const void *from, size_t bytes, off_t place) { return at(fd, from, bytes, place); }

#define BEFORE(type, name, parameters, ...)                                  \
    type name parameters {                                                   \
        change();                                                            \
        return ((type(*) parameters)dlsym(RTLD_NEXT, #name))(__VA_ARGS__);   \
    }

BEFORE(int, rename, (const char *from, const char *to), from, to)
BEFORE(int, renameat, (int a, const char *from, int b, const char *to), a, from, b, to)
BEFORE(int, link, (const char *from, const char *to), from, to)
BEFORE(int, linkat, (int a, const char *from, int b, const char *to, int flags), a, from, b, to, flags)
BEFORE(int, unlink, (const char *path), path)
BEFORE(int, unlinkat, (int folder, const char *path, int flags), folder, path, flags)
BEFORE(int, remove, (const char *path), path)
BEFORE(int, rmdir, (const char *path), path)
BEFORE(int, mkdir, (const char *path, mode_t mode), path, mode)
BEFORE(int, ftruncate, (int fd, off_t length), fd, length)
BEFORE(int, ftruncate64, (int fd, off64_t length), fd, length)
BEFORE(int, fsync, (int fd), fd)
BEFORE(int, fdatasync, (int fd), fd)
BEFORE(ssize_t, sendfile, (int to, int from, off_t *place, size_t bytes), to, from, place, bytes)
BEFORE(ssize_t, sendfile64, (int to, int from, off64_t *place, size_t bytes), to, from, place, bytes)
BEFORE(ssize_t, copy_file_range, (int from, off64_t *a, int to, off64_t *b, size_t bytes, unsigned flags), from, a, to, b, bytes, flags)
