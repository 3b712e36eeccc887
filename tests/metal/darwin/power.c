// CoreFoundation's texts and IOKit's assertions, with the prototypes of CFString.h, CFBase.h and
// IOPMLib.h: what a Mac's server calls to stay awake.
//
// Each assertion leaves a line in the file power/assertions of the Mac's figures when it is made, and
// another when it is released. Texts that are no texts, or are freed twice, end the process.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef const void* CFTypeRef;
typedef const void* CFAllocatorRef;
typedef const struct Text* CFStringRef;
typedef uint32_t CFStringEncoding;
typedef uint32_t IOPMAssertionID;
typedef uint32_t IOPMAssertionLevel;
typedef int IOReturn;

#define UTF8 0x08000100u
#define MARK 0x5445585454455854ull
#define FIRST_ID 70000u

struct Text {
  uint64_t mark;
  char* utf8;
};

static IOPMAssertionID newest = FIRST_ID;

static const char* read_text(CFStringRef text) {
  if (!text || text->mark != MARK) abort();
  return text->utf8;
}

static void note(const char* line) {
  char path[4096];
  const char* const folder = getenv("DARWIN_FIGURES");
  snprintf(path, sizeof path, "%s/power/assertions", folder ? folder : "");
  FILE* const file = fopen(path, "a");
  if (!file) abort();
  fputs(line, file);
  fclose(file);
}

CFStringRef CFStringCreateWithCString(CFAllocatorRef allocator, const char* utf8,
                                      CFStringEncoding encoding) {
  if (allocator || encoding != UTF8) abort();
  struct Text* const text = malloc(sizeof *text);
  if (!text) abort();
  text->mark = MARK;
  text->utf8 = strdup(utf8);
  return text;
}

void CFRelease(CFTypeRef object) {
  struct Text* const text = (struct Text*)object;
  read_text(text);
  text->mark = 0;
  free(text->utf8);
  free(text);
}

IOReturn IOPMAssertionCreateWithName(CFStringRef type, IOPMAssertionLevel level, CFStringRef name,
                                     IOPMAssertionID* id) {
  char line[512];
  *id = ++newest;
  snprintf(line, sizeof line, "+%u %s %u %s\n", *id, read_text(type), level, read_text(name));
  note(line);
  return 0;
}

IOReturn IOPMAssertionRelease(IOPMAssertionID id) {
  char line[64];
  snprintf(line, sizeof line, "-%u\n", id);
  note(line);
  return 0;
}
