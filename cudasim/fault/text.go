package fault

import (
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/purecuda/purecuda/driver"
)

// String returns the plan as one line, from which [Parse] makes the same plan.
func (p Plan) String() string {
	if len(p.chains) == 0 {
		return "nothing"
	}
	chains := make([]string, len(p.chains))
	for i, chain := range p.chains {
		rules := make([]string, len(chain))
		for j, r := range chain {
			rules[j] = r.String()
		}
		chains[i] = strings.Join(rules, " then ")
	}
	return strings.Join(chains, "; ")
}

// String returns the rule as a plan of it alone prints.
func (r Rule) String() string {
	s := verbs[r.verb] + " " + r.cond.String()
	if r.bounded {
		s += " #" + r.nth.String()
	}
	if r.verb != delay {
		s += " with " + codeText(r.code)
	}
	if r.after {
		s += " after"
	}
	if r.gate != "" {
		s += " at " + r.gate
	}
	return s
}

// String returns the condition as it stands in a plan.
func (c Cond) String() string {
	switch c.op {
	case opName:
		return c.name
	case opCall:
		return "call " + c.span.String()
	case opFunc:
		return "func " + c.name
	case opNot:
		return "not " + c.sub[0].String()
	case opAnd, opOr:
		parts := make([]string, len(c.sub))
		for i, s := range c.sub {
			parts[i] = s.String()
		}
		return "(" + strings.Join(parts, map[op]string{opAnd: " and ", opOr: " or "}[c.op]) + ")"
	}
	return "any"
}

// codeText is a code's name in cuda.h, or its number.
func codeText(r driver.Result) string {
	if name, _, ok := strings.Cut(r.Error(), " ("); ok {
		return name
	}
	return strconv.Itoa(int(r))
}

// codes are the codes that have a name, by it.
var codes = sync.OnceValue(func() map[string]driver.Result {
	m := map[string]driver.Result{}
	for r := driver.Result(1); r < 1000; r++ {
		m[codeText(r)] = r
	}
	return m
})

// Parse makes a plan from its line, as the package's documentation describes
// it. No text at all is the plan that does nothing. The error tells where it
// stopped understanding.
func Parse(text string) (Plan, error) {
	p := parser{text: text}
	plan, err := p.plan()
	if err != nil {
		return Plan{}, fmt.Errorf("fault: plan %q, byte %d: %w", text, p.start+1, err)
	}
	if err := plan.check(); err != nil {
		return Plan{}, err
	}
	return plan, nil
}

// A parser stands behind the token tok, which begins at start and ends at end;
// tok is empty at the text's end.
type parser struct {
	text       string
	tok        string
	start, end int
	depth      int
}

// next takes the next token: a word or number, "..", or one sign.
func (p *parser) next() {
	rest := strings.TrimLeft(p.text[p.end:], " \t\r\n")
	p.start = len(p.text) - len(rest)
	n := strings.IndexFunc(rest, func(r rune) bool { return !inWord(r) })
	switch {
	case n < 0:
		n = len(rest)
	case n == 0 && strings.HasPrefix(rest, ".."):
		n = 2
	case n == 0:
		n = 1
	}
	p.tok, p.end = rest[:n], p.start+n
}

// take takes the next token if it is the one that is wanted.
func (p *parser) take(tok string) bool {
	if p.tok != tok {
		return false
	}
	p.next()
	return true
}

func (p *parser) want(what string) error {
	if p.tok == "" {
		return fmt.Errorf("%s is missing", what)
	}
	return fmt.Errorf("%q instead of %s", p.tok, what)
}

func (p *parser) plan() (plan Plan, err error) {
	p.next()
	if p.tok == "" {
		return plan, nil
	}
	if p.take("nothing") {
		if p.tok != "" {
			return plan, p.want("the end")
		}
		return plan, nil
	}
	for {
		var chain []Rule
		for {
			r, err := p.rule()
			if err != nil {
				return plan, err
			}
			chain = append(chain, r)
			if !p.take("then") {
				break
			}
		}
		plan.chains = append(plan.chains, chain)
		if p.tok == "" {
			return plan, nil
		}
		if !p.take(";") {
			return plan, p.want(`";", "then" or the end`)
		}
	}
}

func (p *parser) rule() (r Rule, err error) {
	switch {
	case p.take("fail"):
		r.verb = fail
	case p.take("lose"):
		r.verb = lose
	case p.take("delay"):
		r.verb = delay
	default:
		return r, p.want(`"fail", "lose" or "delay"`)
	}
	if r.cond, err = p.cond(); err != nil {
		return r, err
	}
	if p.take("#") {
		r.bounded = true
		if r.nth, err = p.span(); err != nil {
			return r, err
		}
	}
	for when := false; ; {
		switch {
		case r.code == 0 && p.take("with"):
			if r.code, err = p.code(); err != nil {
				return r, err
			}
		case r.gate == "" && p.take("at"):
			if r.gate = p.tok; !isWord(r.gate) {
				return r, p.want("the name of a gate")
			}
			p.next()
		case !when && p.take("after"):
			r.after, when = true, true
		case !when && p.take("before"):
			when = true
		case r.verb != delay && r.code == 0:
			return r, p.want(`"with" and a code`)
		case r.verb == delay && r.gate == "":
			return r, p.want(`"at" and a gate`)
		default:
			return r, nil
		}
	}
}

func (p *parser) code() (driver.Result, error) {
	r, ok := codes()[p.tok]
	if !ok {
		n, err := p.number(maxCode)
		if err != nil {
			return 0, p.want("a code, as 700 or CUDA_ERROR_ILLEGAL_ADDRESS")
		}
		return driver.Result(n), nil
	}
	p.next()
	return r, nil
}

// cond is one condition: a single one, or several in parentheses.
func (p *parser) cond() (c Cond, err error) {
	if p.depth++; p.depth > 10*maxDepth { // parentheses that mean nothing count here alone
		return c, fmt.Errorf("too many parentheses")
	}
	defer func() { p.depth-- }()
	switch {
	case p.take("any"):
		return Any(), nil
	case p.take("call"):
		c.op = opCall
		c.span, err = p.span()
		return c, err
	case p.take("not"):
		c, err = p.cond()
		return Not(c), err
	case p.take("("):
		if c, err = p.either(); err == nil && !p.take(")") {
			err = p.want(`")", "and" or "or"`)
		}
		return c, err
	case p.tok == "func":
		return c, fmt.Errorf("a condition that is a Go function is no text to parse")
	case entryPoints()[p.tok] != nil:
		c = Name(p.tok)
		p.next()
		return c, nil
	case strings.HasPrefix(p.tok, "cu"):
		return c, fmt.Errorf("purecuda knows no entry point %q", p.tok)
	}
	return c, p.want("a condition")
}

func (p *parser) either() (Cond, error) {
	var ors []Cond
	for {
		var ands []Cond
		for {
			c, err := p.cond()
			if err != nil {
				return c, err
			}
			if ands = append(ands, c); !p.take("and") {
				break
			}
		}
		if ors = append(ors, And(ands...)); !p.take("or") {
			return Or(ors...), nil
		}
	}
}

func (p *parser) span() (s span, err error) {
	if s.first, err = p.number(maxNumber); err != nil {
		return s, err
	}
	s.last = s.first
	if p.take("..") {
		s.last = open
		if p.tok != "" && '0' <= p.tok[0] && p.tok[0] <= '9' {
			s.last, err = p.number(maxNumber)
		}
	}
	return s, err
}

func (p *parser) number(most int) (int, error) {
	n, err := strconv.Atoi(p.tok)
	if err != nil || n < 1 || n > most {
		return 0, p.want(fmt.Sprintf("a number from 1 to %d", most))
	}
	p.next()
	return n, nil
}
