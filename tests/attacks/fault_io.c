// Preloaded into a process, sees every call into the operating system that concerns files under one folder: counts them,
// writes them down, and fails one of them or kills the process there. Linux; tests/attacks/faults.py builds and drives it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/syscall.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_AFTER, FAIL, SHORT, INTERRUPT };
enum { EXCHANGE = 2 };  // RENAME_EXCHANGE

static char root[PATH_MAX];
static size_t root_length;
static long number, fault_at;
static int mode, fault_errno, log_fd = -1;
static char paths[4096][512];  // of descriptors under the folder; empty for others

// at: the number of the call to fail, from 1; 0 for none. log: a descriptor that takes what is done, or -1.
void nstf_fault_arm(const char* folder, long at, int how, int error, int log) {
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    number = 0, fault_at = at, mode = how, fault_errno = error, log_fd = log;
}

void nstf_fault_disarm(void) { root_length = 0; }

long nstf_fault_count(void) { return number; }

static void whole_path(int folder, const char* path, char* out) {
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    char base[PATH_MAX] = "", link[64];
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    const ssize_t size = readlink(link, base, sizeof base - 1);
    base[size > 0 ? size : 0] = 0;
    snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
}

static int watched(const char* path) {
    return root_length && strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int watched_fd(int fd) { return root_length && fd >= 0 && fd < 4096 && paths[fd][0] && watched(paths[fd]); }

// Whether this call is the one: then it does what it must before, and gives back the mode.
static int begin(void) {
    const long now = __sync_add_and_fetch(&number, 1);
    if (now != fault_at) return COUNT;
    if (mode == KILL_BEFORE) syscall(SYS_kill, getpid(), SIGKILL);
    return mode;
}

static void end(int how, const char* op, const char* path, const char* other, int64_t at, const void* data, int64_t size) {
    if (log_fd >= 0) {
        char head[2 * PATH_MAX + 64];
        const int length =
            snprintf(head, sizeof head, "%s\t%s\t%s\t%lld\t%lld\n", op, path, other, (long long)at, (long long)size);
        // In one call: threads write at the same time.
        const struct iovec parts[] = {{head, (size_t)length}, {(void*)data, (size_t)size}};
        syscall(SYS_writev, log_fd, parts, size > 0 && data ? 2 : 1);
    }
    if (how == KILL_AFTER) syscall(SYS_kill, getpid(), SIGKILL);
}

#define FAULT(how)                        \
    if ((how) == FAIL || (how) == INTERRUPT) { \
        errno = (how) == FAIL ? fault_errno : EINTR; \
        return -1;                        \
    }

static int opened(int folder, const char* path, int flags, mode_t permissions) {
    char whole[PATH_MAX];
    if (!root_length) return (int)syscall(SYS_openat, folder, path, flags, permissions);
    whole_path(folder, path, whole);
    const int ours = watched(whole), how = ours ? begin() : COUNT;
    if (ours) FAULT(how);
    const int fd = (int)syscall(SYS_openat, folder, path, flags, permissions);
    if (fd >= 0 && fd < 4096) snprintf(paths[fd], sizeof paths[fd], "%.511s", ours ? whole : "");
    if (ours) end(how, fd < 0 ? "failed" : flags & (O_CREAT | O_TRUNC) ? (flags & O_TRUNC ? "truncate" : "create") : "open",
                  whole, "", 0, NULL, 0);
    return fd;
}

#define OPENED(folder, path, flags)              \
    mode_t permissions = 0;                      \
    if ((flags) & (O_CREAT | O_TMPFILE)) {       \
        va_list rest;                            \
        va_start(rest, flags);                   \
        permissions = va_arg(rest, mode_t);      \
        va_end(rest);                            \
    }                                            \
    return opened(folder, path, flags, permissions)

int open(const char* path, int flags, ...) { OPENED(AT_FDCWD, path, flags); }
int open64(const char* path, int flags, ...) { OPENED(AT_FDCWD, path, flags); }
int openat(int folder, const char* path, int flags, ...) { OPENED(folder, path, flags); }
int openat64(int folder, const char* path, int flags, ...) { OPENED(folder, path, flags); }

int close(int fd) {
    if (fd >= 0 && fd < 4096) paths[fd][0] = 0;
    return (int)syscall(SYS_close, fd);
}

static ssize_t written(int fd, const void* data, size_t size, int64_t at, int positioned) {
    const int ours = watched_fd(fd), how = ours ? begin() : COUNT;
    if (ours) {
        FAULT(how);
        if (how == SHORT && size > 1) size /= 2;
        if (!positioned) at = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    }
    const ssize_t done = positioned ? syscall(SYS_pwrite64, fd, data, size, at) : syscall(SYS_write, fd, data, size);
    if (ours) end(how, "write", paths[fd], "", at, data, done > 0 ? done : 0);
    return done;
}

ssize_t write(int fd, const void* data, size_t size) { return written(fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) { return written(fd, data, size, at, 1); }
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) { return written(fd, data, size, at, 1); }

static ssize_t got(int fd, void* data, size_t size, int64_t at, int positioned) {
    const int ours = watched_fd(fd), how = ours ? begin() : COUNT;
    if (ours) {
        FAULT(how);
        if (how == SHORT && size > 1) size /= 2;
    }
    const ssize_t done = positioned ? syscall(SYS_pread64, fd, data, size, at) : syscall(SYS_read, fd, data, size);
    if (ours) end(how, "read", paths[fd], "", 0, NULL, 0);
    return done;
}

ssize_t read(int fd, void* data, size_t size) { return got(fd, data, size, 0, 0); }
ssize_t pread(int fd, void* data, size_t size, off_t at) { return got(fd, data, size, at, 1); }
ssize_t pread64(int fd, void* data, size_t size, off64_t at) { return got(fd, data, size, at, 1); }

// Of several parts, the first alone: whoever calls has to call again for the rest.
static ssize_t got_parts(int fd, const struct iovec* parts, int count, int64_t at) {
    if (watched_fd(fd) && count > 0) return got(fd, parts[0].iov_base, parts[0].iov_len, at, 1);
    return syscall(SYS_preadv, fd, parts, count, at, 0);
}

ssize_t preadv(int fd, const struct iovec* parts, int count, off_t at) { return got_parts(fd, parts, count, at); }
ssize_t preadv64(int fd, const struct iovec* parts, int count, off64_t at) { return got_parts(fd, parts, count, at); }
ssize_t preadv2(int fd, const struct iovec* parts, int count, off_t at, int flags) {
    return got_parts(fd, parts, count, at);
}
ssize_t preadv64v2(int fd, const struct iovec* parts, int count, off64_t at, int flags) {
    return got_parts(fd, parts, count, at);
}

// Copies inside the kernel are refused as sockets are, so that Python reads and writes instead.
ssize_t sendfile64(int to, int from, off64_t* at, size_t size) {
    if (watched_fd(to) || watched_fd(from)) {
        errno = ENOTSOCK;
        return -1;
    }
    return syscall(SYS_sendfile, to, from, at, size);
}
ssize_t sendfile(int to, int from, off_t* at, size_t size) { return sendfile64(to, from, at, size); }
ssize_t copy_file_range(int from, off64_t* at, int to, off64_t* to_at, size_t size, unsigned flags) {
    if (watched_fd(to) || watched_fd(from)) {
        errno = EXDEV;
        return -1;
    }
    return syscall(SYS_copy_file_range, from, at, to, to_at, size, flags);
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
    ssize_t all = 0;
    for (int i = 0; i < count; ++i) {
        const ssize_t done = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (done < 0) return all ? all : done;
        all += done;
        if ((size_t)done < parts[i].iov_len) break;
    }
    return all;
}

static int synced(int fd, long call) {
    const int ours = watched_fd(fd), how = ours ? begin() : COUNT;
    if (ours) FAULT(how);
    const int done = (int)syscall(call, fd);
    if (ours) end(how, "fsync", paths[fd], "", 0, NULL, 0);
    return done;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

int ftruncate64(int fd, off64_t size) {
    const int ours = watched_fd(fd), how = ours ? begin() : COUNT;
    if (ours) FAULT(how);
    const int done = (int)syscall(SYS_ftruncate, fd, size);
    if (ours) end(how, "cut", paths[fd], "", size, NULL, 0);
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int moved(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    if (!root_length) return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    whole_path(from_folder, from, a), whole_path(to_folder, to, b);
    const int ours = watched(a) || watched(b), how = ours ? begin() : COUNT;
    if (ours) FAULT(how);
    const int done = (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    if (ours) end(how, done ? "failed" : flags & EXCHANGE ? "exchange" : "rename", a, b, 0, NULL, 0);
    return done;
}

int rename(const char* from, const char* to) { return moved(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_folder, const char* from, int to_folder, const char* to) {
    return moved(from_folder, from, to_folder, to, 0);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
    return moved(from_folder, from, to_folder, to, flags);
}

static int removed(int folder, const char* path, int flags) {
    char whole[PATH_MAX];
    if (!root_length) return (int)syscall(SYS_unlinkat, folder, path, flags);
    whole_path(folder, path, whole);
    const int ours = watched(whole), how = ours ? begin() : COUNT;
    if (ours) FAULT(how);
    const int done = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (ours) end(how, done ? "failed" : "unlink", whole, "", 0, NULL, 0);
    return done;
}

int unlink(const char* path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char* path, int flags) { return removed(folder, path, flags); }

static int folder_made(int folder, const char* path, mode_t permissions) {
    char whole[PATH_MAX];
    if (!root_length) return (int)syscall(SYS_mkdirat, folder, path, permissions);
    whole_path(folder, path, whole);
    const int ours = watched(whole), how = ours ? begin() : COUNT;
    if (ours) FAULT(how);
    const int done = (int)syscall(SYS_mkdirat, folder, path, permissions);
    if (ours) end(how, done ? "failed" : "mkdir", whole, "", 0, NULL, 0);
    return done;
}

int mkdir(const char* path, mode_t permissions) { return folder_made(AT_FDCWD, path, permissions); }
int mkdirat(int folder, const char* path, mode_t permissions) { return folder_made(folder, path, permissions); }
