package cuload

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// An Error tells that no usable driver library was found.
type Error struct {
	Attempts []Attempt // in the order of the search
}

// An Attempt is one library that was tried, and why it does not serve.
type Attempt struct {
	Path string // "" where no path was tried
	Err  error
}

func (a Attempt) String() string {
	reason := strings.Join(strings.Fields(a.Err.Error()), " ") // on one line
	if a.Path == "" {
		return reason
	}
	return oneLine(a.Path) + ": " + reason
}

// oneLine quotes a path that would break the line of a message.
func oneLine(path string) string {
	if q := fmt.Sprintf("%q", path); len(q) != len(path)+2 {
		return q
	}
	return path
}

// Error lists the attempts: one on the message's own line, several on a line
// each.
func (e *Error) Error() string {
	const head = "no usable CUDA driver library"
	switch len(e.Attempts) {
	case 0:
		return head
	case 1:
		return head + ": " + e.Attempts[0].String()
	}
	var b strings.Builder
	b.WriteString(head + ":")
	for _, a := range e.Attempts {
		b.WriteString("\n\t" + a.String())
	}
	return b.String()
}

// Unwrap returns the reason of each attempt.
func (e *Error) Unwrap() []error {
	list := make([]error, len(e.Attempts))
	for i, a := range e.Attempts {
		list[i] = a.Err
	}
	return list
}

// An InitError tells that the library's first calls failed, as they do in the
// stub library that CUDA's toolkit links with, and without a device.
type InitError struct {
	Call   string // "cuInit" or "cuDriverGetVersion"
	Result cuapi.Result
}

func (e *InitError) Error() string {
	why := ""
	switch e.Result {
	case cuapi.StubLibrary:
		why = " (the toolkit's stub library, not a driver)"
	case cuapi.NoDevice:
		why = " (no CUDA device)"
	case cuapi.SystemDriverMismatch:
		why = " (library and kernel module are of different driver versions)"
	case cuapi.SystemNotReady:
		why = " (the system is not ready to run CUDA)"
	}
	return fmt.Sprintf("%s failed: %v%s", e.Call, e.Result, why)
}

// A MissingError tells that the library lacks symbols that purecuda needs.
type MissingError struct {
	Symbols []string // in the manifest's order
}

func (e *MissingError) Error() string {
	text := "missing symbols: " + strings.Join(e.Symbols, ", ")
	if len(e.Symbols) > 0 && e.Symbols[0] == bootSymbol {
		text = "not a CUDA driver: " + text
	}
	return text
}

// bootSymbol is the symbol without which a library is not CUDA's at all.
const bootSymbol = "cuInit"

// A VersionError tells that the driver is too old.
type VersionError struct {
	Version int // what it serves: 10020 is CUDA 10.2
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("the driver is too old: it serves CUDA %d.%d, and purecuda needs CUDA %d.%d (driver R450) or newer",
		e.Version/1000, e.Version%1000/10, MinVersion/1000, MinVersion%1000/10)
}

// A FileError tells that a file is no library that this process could load.
type FileError struct {
	Reason string
}

func (e *FileError) Error() string { return e.Reason }

// A LinkError is what the dynamic linker says about a library.
type LinkError struct {
	Text string
}

func (e *LinkError) Error() string { return e.Text }

// Is reports whether target is fs.ErrNotExist and the linker found no such file.
func (e *LinkError) Is(target error) bool {
	return target == fs.ErrNotExist && strings.Contains(e.Text, "No such file or directory")
}

// A PlatformError tells that there is no CUDA driver for this platform. It
// matches errors.ErrUnsupported.
type PlatformError struct {
	OS, Arch string
}

func (e *PlatformError) Error() string {
	return "there is no CUDA driver for " + e.OS + "/" + e.Arch
}

// Is reports whether target is errors.ErrUnsupported.
func (e *PlatformError) Is(target error) bool { return target == errors.ErrUnsupported }
