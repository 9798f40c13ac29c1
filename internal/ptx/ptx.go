// Package ptx reads the declarations in PTX text, NVIDIA's assembly language, for the
// simulator.
package ptx

import (
	"fmt"
	"strconv"
	"strings"
)

// A Param is one parameter of a kernel: where it lies in the argument block, and its
// bytes.
type Param struct {
	Offset, Size uintptr
}

// An Image is what PTX text declares: kernels with their parameters, in order, and
// global variables with their bytes. The code is not read.
type Image struct {
	Entries map[string][]Param
	Globals map[string]uint64
}

// typeSizes are the fundamental types of PTX, in bytes.
var typeSizes = map[string]uintptr{
	".b8": 1, ".u8": 1, ".s8": 1, ".pred": 1,
	".b16": 2, ".u16": 2, ".s16": 2, ".f16": 2, ".bf16": 2,
	".b32": 4, ".u32": 4, ".s32": 4, ".f32": 4, ".f16x2": 4,
	".b64": 8, ".u64": 8, ".s64": 8, ".f64": 8, ".b128": 16,
	".texref": 8, ".samplerref": 8, ".surfref": 8,
}

// maxParams is the limit of a kernel's argument block (PTX ISA, "Kernel
// Function Parameters").
const maxParams = 32764

// Parse reads a module. Only what is wrong in the declarations is found: the error
// is worded as that of NVIDIA's compiler.
func Parse(text string) (*Image, error) {
	p := &scanner{line: 1, text: text}
	img := &Image{Entries: map[string][]Param{}, Globals: map[string]uint64{}}
	version := false
	for p.next() {
		switch p.tok {
		case ".version":
			version = true
			p.next()
		case ".entry":
			if !version {
				return nil, p.errorf("declaration before .version")
			}
			name := p.word()
			params, err := p.params()
			if err != nil {
				return nil, err
			}
			if !identifier(name) {
				return nil, p.errorf("syntax error near %q: a kernel name is expected", name)
			}
			if _, ok := img.Entries[name]; ok {
				return nil, p.errorf("duplicate definition of kernel %q", name)
			}
			if !p.skipTo("{", ";") || p.tok == "{" && !p.body() {
				return nil, p.errorf("unexpected end of file in kernel %q", name)
			}
			img.Entries[name] = params
		case ".global", ".const":
			v, err := p.variable()
			if err != nil {
				return nil, err
			}
			img.Globals[v.name] = uint64(v.size)
			if p.tok != ";" && !p.skipTo(";") {
				return nil, p.errorf("unexpected end of file in variable %q", v.name)
			}
		case "{":
			if !p.body() {
				return nil, p.errorf("unexpected end of file: a brace is open")
			}
		case "}":
			return nil, p.errorf("syntax error near %q", p.tok)
		}
	}
	if !version {
		return nil, p.errorf("missing .version directive")
	}
	return img, nil
}

// A scanner splits the text into words, numbers and single punctuation marks.
type scanner struct {
	text string
	pos  int
	line int
	tok  string
}

func (p *scanner) errorf(format string, args ...any) error {
	return fmt.Errorf("ptxas application ptx input, line %d; error: %s", p.line, fmt.Sprintf(format, args...))
}

func wordByte(c byte) bool {
	return c == '.' || c == '_' || c == '$' || c == '%' || '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'z'
}

// next reads the next token; false at the end of the text.
func (p *scanner) next() bool {
	p.tok = ""
	for p.pos < len(p.text) {
		rest := p.text[p.pos:]
		switch c := rest[0]; {
		case c == '\n':
			p.line++
			p.pos++
		case c <= ' ':
			p.pos++
		case strings.HasPrefix(rest, "//"):
			p.pos = len(p.text)
			if i := strings.IndexByte(rest, '\n'); i >= 0 {
				p.pos -= len(rest) - i
			}
		case strings.HasPrefix(rest, "/*"):
			n := len(rest)
			if i := strings.Index(rest[2:], "*/"); i >= 0 {
				n = i + 4
			}
			p.line += strings.Count(rest[:n], "\n")
			p.pos += n
		case c == '"':
			n := strings.IndexByte(rest[1:], '"') + 2
			if n == 1 {
				n = len(rest)
			}
			p.take(n)
			return true
		case wordByte(c):
			n := 1
			for n < len(rest) && wordByte(rest[n]) {
				n++
			}
			p.take(n)
			return true
		default:
			p.take(1)
			return true
		}
	}
	return false
}

func (p *scanner) take(n int) {
	p.tok = p.text[p.pos : p.pos+n]
	p.line += strings.Count(p.tok, "\n")
	p.pos += n
}

func (p *scanner) word() string {
	p.next()
	return p.tok
}

func (p *scanner) skipTo(stops ...string) bool {
	for p.next() {
		for _, s := range stops {
			if p.tok == s {
				return true
			}
		}
		if p.tok == "{" { // an initializer
			if !p.body() {
				return false
			}
		}
	}
	return false
}

// body skips a braced block whose opening was read.
func (p *scanner) body() bool {
	for depth := 1; p.next(); {
		switch p.tok {
		case "{":
			depth++
		case "}":
			if depth--; depth == 0 {
				return true
			}
		}
	}
	return false
}

func identifier(s string) bool {
	return s != "" && s[0] != '.' && (s[0] < '0' || s[0] > '9') && wordByte(s[0]) && !strings.Contains(s, ".")
}

// params reads a kernel's parameter list, if there is one, and lays it out.
func (p *scanner) params() ([]Param, error) {
	at, line := p.pos, p.line
	if p.word() != "(" {
		p.pos, p.line = at, line
		return nil, nil
	}
	var out []Param
	var end uintptr
	for p.next() && p.tok != ")" {
		if p.tok != ".param" {
			return nil, p.errorf("syntax error near %q: .param is expected", p.tok)
		}
		v, err := p.variable()
		if err != nil {
			return nil, err
		}
		off := (end + v.align - 1) / v.align * v.align
		if end = off + v.size; end > maxParams {
			return nil, p.errorf("formal parameter space overflowed: %d bytes", end)
		}
		out = append(out, Param{Offset: off, Size: v.size})
		if p.tok == ")" {
			break
		}
		if p.tok != "," {
			return nil, p.errorf("syntax error near %q in a parameter list", p.tok)
		}
	}
	if p.tok != ")" {
		return nil, p.errorf("unexpected end of file in a parameter list")
	}
	return out, nil
}

// A variable is a declaration behind .param, .global or .const.
type variable struct {
	name        string
	size, align uintptr
}

// variable reads a declaration and stops at the token behind it.
func (p *scanner) variable() (v variable, err error) {
	var size uintptr
	for p.next() && strings.HasPrefix(p.tok, ".") {
		switch tok := p.tok; tok {
		case ".align":
			n, err := strconv.ParseUint(p.word(), 0, 16)
			if err != nil || n == 0 || n&(n-1) != 0 || n > 128 {
				return v, p.errorf("invalid alignment %q", p.tok)
			}
			v.align = uintptr(n)
		case ".ptr", ".global", ".const", ".shared", ".local", ".v2", ".v4":
			if tok == ".v2" || tok == ".v4" {
				size *= uintptr(tok[2] - '0')
			}
		default:
			n, ok := typeSizes[tok]
			if !ok {
				return v, p.errorf("unknown type %q", tok)
			}
			size = n
		}
		if p.tok == ".ptr" { // the alignment behind .ptr is that of the target
			if err := p.pointee(); err != nil {
				return v, err
			}
			break
		}
	}
	v.name = p.tok
	if !identifier(v.name) {
		return v, p.errorf("syntax error near %q: a name is expected", v.name)
	}
	if size == 0 {
		return v, p.errorf("no type for %q", v.name)
	}
	v.align = max(v.align, size)
	if v.align > 16 {
		v.align = 16
	}
	v.size = size
	for p.next() && p.tok == "[" {
		n, err := strconv.ParseUint(p.word(), 0, 32)
		if err != nil || p.word() != "]" || n == 0 || uint64(v.size)*n > 1<<30 {
			return v, p.errorf("invalid array size of %q", v.name)
		}
		v.size *= uintptr(n)
	}
	return v, nil
}

// pointee skips the attributes behind .ptr: a state space and an alignment.
func (p *scanner) pointee() error {
	for p.next() && strings.HasPrefix(p.tok, ".") {
		if p.tok == ".align" {
			if _, err := strconv.ParseUint(p.word(), 0, 16); err != nil {
				return p.errorf("invalid alignment %q", p.tok)
			}
		}
	}
	return nil
}
