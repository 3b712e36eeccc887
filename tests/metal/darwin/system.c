// What Darwin answers where Linux answers otherwise: preloaded into every process of the rung.
//
// Limits of open files hold for the whole process; pages of 16 KiB, and memory files that are not
// there, for what quire's extension asks: other libraries here were made for Linux. The kernel's figures are
// files in the folder that DARWIN_FIGURES names: sysctl/<name>.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE_BYTES ((size_t)16384)
#define LONGEST_SHM_NAME 31  // PSHMNAMLEN of XNU's bsd/kern/posix_shm.c
#define THIS_SYSTEMS(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ASKED_BY_QUIRE asked_by_quire(__builtin_return_address(0))

static bool asked_by_quire(const void* from) {
  Dl_info info;
  return dladdr(from, &info) && info.dli_fname && strstr(info.dli_fname, "/_ext.");
}

static int refuse(int code) {
  errno = code;
  return -1;
}

// --- the kernel's figures --------------------------------------------------------------------------

static bool read_figure(const char* name, char* text, size_t bytes) {
  char path[4096];
  const char* const folder = getenv("DARWIN_FIGURES");
  snprintf(path, sizeof path, "%s/sysctl/%s", folder ? folder : "", name);
  FILE* const file = fopen(path, "re");
  if (file == NULL) {
    return false;
  }
  const bool read = fgets(text, (int)bytes, file) != NULL;
  fclose(file);
  return read;
}

int sysctlbyname(const char* name, void* old, size_t* old_bytes, void* new, size_t new_bytes) {
  (void)new, (void)new_bytes;
  char text[256];
  if (!read_figure(name, text, sizeof text)) {
    return refuse(ENOENT);
  }
  const int64_t number = strtoll(text, NULL, 10);
  const int32_t narrow = (int32_t)number;
  if (*old_bytes == sizeof narrow) {
    memcpy(old, &narrow, sizeof narrow);
  } else if (*old_bytes == sizeof number) {
    memcpy(old, &number, sizeof number);
  } else {
    return refuse(ENOMEM);
  }
  return 0;
}

// struct rusage_info_v0: a UUID, then ten numbers, of which the eighth is the physical footprint:
// memory of no file's, shared memory included.
int proc_pid_rusage(int pid, int flavor, void* info) {
  FILE* const file = fopen("/proc/self/status", "re");
  if (pid != getpid() || flavor != 0 || file == NULL) {
    return refuse(EINVAL);
  }
  uint64_t bytes = 0, kib = 0;
  char line[256];
  while (fgets(line, sizeof line, file) != NULL) {
    if (sscanf(line, "RssAnon: %lu", &kib) == 1 || sscanf(line, "RssShmem: %lu", &kib) == 1) {
      bytes += kib * 1024;
    }
  }
  fclose(file);
  memset(info, 0, 16 + 10 * sizeof bytes);
  memcpy((char*)info + 16 + 7 * sizeof bytes, &bytes, sizeof bytes);
  return 0;
}

// --- limits of open files --------------------------------------------------------------------------
// bsd/kern/kern_resource.c, dosetrlimit: a soft limit that is new may not be beyond
// kern.maxfilesperproc, infinity neither. The system here has a hard limit of as many; it is told as
// infinite, unless it has been lowered.

static rlim_t most_files(void) {
  char text[64];
  return read_figure("kern.maxfilesperproc", text, sizeof text) ? strtoull(text, NULL, 10) : 0;
}

int getrlimit(__rlimit_resource_t resource, struct rlimit* limits) {
  const int result = THIS_SYSTEMS(getrlimit)(resource, limits);
  if (result == 0 && resource == RLIMIT_NOFILE && limits->rlim_max >= most_files()) {
    limits->rlim_max = RLIM_INFINITY;
  }
  return result;
}

int setrlimit(__rlimit_resource_t resource, const struct rlimit* limits) {
  if (resource != RLIMIT_NOFILE) {
    return THIS_SYSTEMS(setrlimit)(resource, limits);
  }
  const rlim_t most = most_files();
  struct rlimit now;
  getrlimit(resource, &now);
  if (limits->rlim_cur > limits->rlim_max) {
    return refuse(EINVAL);
  }
  if (limits->rlim_max > now.rlim_max) {
    return refuse(EPERM);
  }
  if (limits->rlim_cur != now.rlim_cur && limits->rlim_cur > most) {
    return refuse(EINVAL);
  }
  const struct rlimit here = {limits->rlim_cur, limits->rlim_max > most ? most : limits->rlim_max};
  return THIS_SYSTEMS(setrlimit)(resource, &here);
}

int getrlimit64(__rlimit_resource_t resource, struct rlimit64* limits) {
  return getrlimit(resource, (struct rlimit*)limits);
}

int setrlimit64(__rlimit_resource_t resource, const struct rlimit64* limits) {
  return setrlimit(resource, (const struct rlimit*)limits);
}

_Static_assert(sizeof(struct rlimit) == sizeof(struct rlimit64), "as on every 64-bit Linux");

// --- shared memory ---------------------------------------------------------------------------------

int memfd_create(const char* name, unsigned flags) {
  return ASKED_BY_QUIRE ? refuse(ENOSYS) : THIS_SYSTEMS(memfd_create)(name, flags);
}

int shm_open(const char* name, int flags, mode_t mode) {
  return strlen(name) > LONGEST_SHM_NAME ? refuse(ENAMETOOLONG)
                                         : THIS_SYSTEMS(shm_open)(name, flags, mode);
}

static bool is_shared_memory(int fd, struct stat* object) {
  struct stat place;
  return fstat(fd, object) == 0 && stat("/dev/shm", &place) == 0 && object->st_dev == place.st_dev;
}

int ftruncate(int fd, off_t bytes) {
  struct stat object;
  // An object gets its size once.
  if (is_shared_memory(fd, &object) && (object.st_size != 0 || bytes == 0)) {
    return refuse(EINVAL);
  }
  return THIS_SYSTEMS(ftruncate)(fd, bytes);
}

int ftruncate64(int fd, off64_t bytes) { return ftruncate(fd, bytes); }

// --- pages -----------------------------------------------------------------------------------------

long sysconf(int name) {
  return name == _SC_PAGESIZE && ASKED_BY_QUIRE ? (long)PAGE_BYTES : THIS_SYSTEMS(sysconf)(name);
}

static bool is_aligned(const void* address) { return (uintptr_t)address % PAGE_BYTES == 0; }

// Where the kernel here would give any page, Darwin gives one of 16 KiB.
static void* aligned_room(size_t bytes) {
  const size_t all = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES;
  char* const start =
      THIS_SYSTEMS(mmap)(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    return MAP_FAILED;
  }
  char* const first = (char*)(((uintptr_t)start + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
  const size_t before = (size_t)(first - start), behind = PAGE_BYTES - before;
  if (before) {
    THIS_SYSTEMS(munmap)(start, before);
  }
  if (behind) {
    THIS_SYSTEMS(munmap)(first + (all - PAGE_BYTES), behind);
  }
  return first;
}

static void* map(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  struct stat object;
  if ((flags & MAP_FIXED && !is_aligned(address)) || (size_t)offset % PAGE_BYTES) {
    errno = EINVAL;
    return MAP_FAILED;
  }
  if (!(flags & MAP_ANON) && is_shared_memory(fd, &object) &&
      (size_t)offset + bytes > (size_t)object.st_size) {
    errno = EINVAL;  // bsd/kern/posix_shm.c, pshm_mmap
    return MAP_FAILED;
  }
  if (!(flags & MAP_FIXED) && (address = aligned_room(bytes)) == MAP_FAILED) {
    return MAP_FAILED;
  }
  return THIS_SYSTEMS(mmap)(address, bytes, protection, flags | MAP_FIXED, fd, offset);
}

void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  return ASKED_BY_QUIRE ? map(address, bytes, protection, flags, fd, offset)
                        : THIS_SYSTEMS(mmap)(address, bytes, protection, flags, fd, offset);
}

void* mmap64(void* address, size_t bytes, int protection, int flags, int fd, off64_t offset) {
  return ASKED_BY_QUIRE ? map(address, bytes, protection, flags, fd, offset)
                        : THIS_SYSTEMS(mmap)(address, bytes, protection, flags, fd, offset);
}

int munmap(void* address, size_t bytes) {
  return ASKED_BY_QUIRE && !is_aligned(address) ? refuse(EINVAL)
                                                : THIS_SYSTEMS(munmap)(address, bytes);
}

int mprotect(void* address, size_t bytes, int protection) {
  return ASKED_BY_QUIRE && !is_aligned(address) ? refuse(EINVAL)
                                                : THIS_SYSTEMS(mprotect)(address, bytes, protection);
}
