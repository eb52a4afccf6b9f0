package configs

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/validation"
)

// RulesName is the key of a ConfigMap, or the file of a directory, that has rules and no profile.
// NVIDIA's config-manager selects a profile by its name, so it ignores this key; only its fallback
// "single" counts it.
const RulesName = "virgate-rules"

const rulesKey = "rules"

// Limits of a list of rules. The check whether a rule can be reached takes time that grows with the
// square of their number.

// Rules choose a node's profile by the labels of its Node object.
type Rules struct {
	// List is in order: the first matching rule counts.
	List []Rule
	// Spread is the time over which nodes switch to a changed source of profiles: each node waits
	// for a random part of it. With 0 they switch at once.
	Spread time.Duration
	// Generation is a hash of the document.
	Generation string
}

// Rule chooses a profile for nodes whose labels meet all of its requirements.
type Rule struct {
	// Profile is the name of the profile. Layout is the name of a MIG layout that replaces the
	// profile's own; "" for none.
	Profile, Layout string
	// Line is the line on which the rule begins.
	Line int

	requirements labels.Requirements
	// layout is the position of Layout in the document.
	layout value
}

// RuleMatch is the result of Rules for a node.
type RuleMatch struct {
	// Rule is the first matching rule, Number its number, counted from 1; 0 for none.
	Rule   Rule
	Number int
	// Unknown are the labels of the node's inventory that decide whether a rule matches, and
	// UnknownRule is the number of that rule. They are set only while the inventory is not known;
	// Number is then 0.
	Unknown     []string
	UnknownRule int
}

// Match finds the first rule for a node with these labels. It takes feature discovery's labels only
// from the inventory, as they are without sharing and partitions, and ignores the Node's values,
// because these could depend on the profile. A nil inventory is not known yet.
func (r Rules) Match(node, inventory map[string]string) RuleMatch {
	set := labels.Set{}
	for name, value := range node {
		if use := labelUseOf(name); !use.inventory && use.refused == "" {
			set[name] = value
		}
	}
	for name, value := range inventory {
		if InventoryLabel(name) {
			set[name] = value
		}
	}
	for i, rule := range r.List {
		var unknown []string
		matches := true
		for _, requirement := range rule.requirements {
			if inventory == nil && InventoryLabel(requirement.Key()) {
				unknown = append(unknown, requirement.Key())
			} else if !requirement.Matches(set) {
				matches = false
			}
		}
		switch {
		case !matches:
		case unknown != nil:
			slices.Sort(unknown)
			return RuleMatch{Unknown: slices.Compact(unknown), UnknownRule: i + 1}
		default:
			return RuleMatch{Rule: rule, Number: i + 1}
		}
	}
	return RuleMatch{}
}

// InventoryLabels returns the sorted labels of the node's inventory that the rules use.
func (r Rules) InventoryLabels() (names []string) {
	for _, rule := range r.List {
		for _, requirement := range rule.requirements {
			if InventoryLabel(requirement.Key()) {
				names = append(names, requirement.Key())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// RuleLabel reports whether rules can depend on the label, apart from labels of the inventory.
func RuleLabel(name string) bool {
	use := labelUseOf(name)
	return !use.inventory && use.refused == ""
}

// InventoryLabel reports whether the label is one of feature discovery's labels that depend only on
// the node's GPUs and driver.
func InventoryLabel(name string) bool { return labelUseOf(name).inventory }

// labelUse is how rules may use a label.
type labelUse struct {
	inventory bool
	// refused is why rules must not use it; "" if they may.
	refused string
}

var (
	inventoryLabel = regexp.MustCompile(
		`^nvidia\.com/(gpu\.(product|memory|family|machine|mode|clique|compute\.(major|minor)|model\..+)|` +
			`mig\.capable|cuda\.(driver|runtime)(-version)?\.(major|minor|rev|revision|full)|` +
			`vgpu\.(present|host-driver-(version|branch)))$`)
	// profileLabel matches the labels that sharing and partitions change, under any resource's
	// name.
	profileLabel = regexp.MustCompile(
		`^nvidia\.com/(mig-.*|.+\.(product|count|replicas|sharing-strategy|memory|multiprocessors|` +
			`slices\.(gi|ci)|engines\.(copy|decoder|encoder|jpeg|ofa))|mig\.strategy|mps\.capable)$`)
)

func labelUseOf(name string) labelUse {
	switch {
	case !strings.HasPrefix(name, "nvidia.com/"):
		return labelUse{}
	case inventoryLabel.MatchString(name):
		return labelUse{inventory: true}
	case strings.HasPrefix(name, "nvidia.com/gpu.deploy."):
		return labelUse{refused: "the label changes while a MIG layout is changed or the driver is replaced, so a " +
			"rule could undo what made it match"}
	case profileLabel.MatchString(name):
		return labelUse{refused: "the label depends on the profile, so a rule could undo what made it match"}
	case name == "nvidia.com/device-plugin.config.state" || name == "nvidia.com/mig.config.state":
		return labelUse{refused: "the label says how far the profile is, so a rule could undo what made it match"}
	case name == "nvidia.com/device-plugin.config":
		return labelUse{refused: "the label names a profile itself, and then no rule counts"}
	case name == "nvidia.com/gfd.timestamp":
		return labelUse{refused: "the label is another one after each start"}
	}
	return labelUse{}
}

// Rules reads the document RulesName. Its rules can name the profiles beside it. ok is false if
// there is no such document. source is the location of the documents, for messages. The error is of
// type Problems.
func (d Documents) Rules(source string) (rules Rules, ok bool, err error) {
	text, ok := d[RulesName]
	if !ok {
		return Rules{}, false, nil
	}
	inside := SelectedProfile{Source: source, Name: RulesName}.String()
	rules, err = parseDocument(inside, []byte(text),
		func(root value) Rules { return readRules(root, d.ProfileNames(), true) })
	rules.Generation = hashOf(text)
	return rules, true, err
}

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:6])
}

// readRules reads a list of rules. profiles are the profiles that a rule can name, if known is
// true.
func readRules(root value, profiles []string, known bool) Rules {
	d := walker{}.read(root, rulesKeys)
	return Rules{
		Spread: get[time.Duration](d, "spread"),
		List:   readRuleList(d.at(rulesKey).items, profiles, known),
	}
}

// readRuleList reads only the rules, and finds the rules that no node reaches.
func readRuleList(items []value, profiles []string, known bool) (rules []Rule) {
	var good []Rule // The rules read so far, for the check of later rules.
	var numbers []int
	for i, item := range items {
		problems := item.source.problems
		before := len(*problems)
		rule := readRule(item, profiles, known)
		if len(*problems) == before {
			rule.checkReachable(item, good, numbers)
		}
		if len(*problems) == before {
			good, numbers = append(good, rule), append(numbers, i+1)
		}
		for j := before; j < len(*problems); j++ {
			(*problems)[j].Message = fmt.Sprintf("rule %d: %s", i+1, (*problems)[j].Message)
		}
		rules = append(rules, rule)
	}
	return rules
}

func readRule(v value, profiles []string, known bool) Rule {
	v = walker{}.read(v, ruleKeys)
	rule := Rule{
		Line:    v.line,
		Profile: get[string](v, "profile"),
		Layout:  get[string](v, "mig"),
		layout:  v.at("mig"),
	}
	if rule.Profile != "" && known && !slices.Contains(profiles, rule.Profile) {
		there := "there is none"
		if len(profiles) > 0 {
			there = "there is " + strings.Join(profiles, ", ")
		}
		v.at("profile").problem("no profile has this name, " + there)
	}
	selector, expressions := v.at("nodeSelector"), v.at("matchExpressions")
	if v.shape() == shapeMapping && selector.absent() && expressions.absent() {
		v.problemHere("nodeSelector or matchExpressions is required; nodeSelector: {} matches every node")
	}
	for _, e := range selector.entries {
		if text, ok := e.value.content.(string); ok && checkLabel(e.problem, e.key) && checkLabelValue(e.value, text) {
			rule.require(e.value, e.key, selection.In, []string{text})
		}
	}
	for _, item := range expressions.items {
		rule.readExpression(item)
	}
	return rule
}

// operators are the operators of nodeAffinity.
var operators = map[string]selection.Operator{
	"In":           selection.In,
	"NotIn":        selection.NotIn,
	"Exists":       selection.Exists,
	"DoesNotExist": selection.DoesNotExist,
	"Gt":           selection.GreaterThan,
	"Lt":           selection.LessThan,
}

func (r *Rule) readExpression(v value) {
	operator, list := get[string](v, "operator"), v.at("values")
	key, keyGiven := v.at("key").content.(string)
	keyGiven = keyGiven && checkLabel(v.at("key").problem, key)
	var values []string
	for _, item := range list.items {
		if text, ok := item.content.(string); ok && checkLabelValue(item, text) {
			values = append(values, text)
		}
	}
	if len(values) < len(list.items) || !keyGiven || operator == "" {
		return
	}
	switch operator {
	case "In", "NotIn":
		if len(values) == 0 {
			list.problemHere(operator + " needs one value or more")
			return
		}
	case "Exists", "DoesNotExist":
		if len(values) > 0 {
			list.problemHere(operator + " takes no values")
			return
		}
	default:
		if len(values) != 1 {
			list.problemHere(operator + " needs one value")
			return
		}
		if _, err := strconv.ParseInt(values[0], 10, 64); err != nil {
			list.items[0].problem(operator + " needs a whole number, in quotes")
			return
		}
	}
	r.require(v, key, operators[operator], values)
}

// require adds a requirement, made by Kubernetes' own library.
func (r *Rule) require(at value, key string, operator selection.Operator, values []string) {
	requirement, err := labels.NewRequirement(key, operator, values)
	if err != nil {
		at.problemHere(err.Error())
		return
	}
	r.requirements = append(r.requirements, *requirement)
}

// checkLabel reports an invalid label name, or a label that rules must not use. It returns false
// for these.
func checkLabel(problem func(string), name string) bool {
	if len(validation.IsQualifiedName(name)) > 0 {
		problem("expected the name of a label, such as example.com/pool")
		return false
	}
	if why := labelUseOf(name).refused; why != "" {
		problem("rules must not use this label: " + why)
		return false
	}
	return true
}

func checkLabelValue(v value, text string) bool {
	if len(validation.IsValidLabelValue(text)) == 0 {
		return true
	}
	v.problem(
		"no label can have this value: it has letters, digits, '-', '_' and '.' only, at most 63, and begins and " +
			"ends with a letter or a digit")
	return false
}

// checkReachable reports a rule that matches no node, or whose nodes all match an earlier rule.
func (r Rule) checkReachable(at value, earlier []Rule, numbers []int) {
	if r.never() {
		at.problemHere("matches no node: no label can have such a value")
		return
	}
	for i, other := range earlier {
		if other.covers(r) {
			at.problemHere(fmt.Sprintf("is never reached: rule %d matches every node that it matches", numbers[i]))
			return
		}
	}
}

// never reports whether no labels meet the requirements.
func (r Rule) never() bool {
	byKey := r.byKey()
	for key, requirements := range byKey {
		meets := func(set labels.Set) bool { return matchAll(requirements, set) }
		if !slices.ContainsFunc(samples(key, requirements), meets) {
			return true
		}
	}
	return false
}

// covers reports whether r matches every node that the other rule matches; the other rule must
// match some node. Requirements about different labels are independent, so it is enough to check
// each of r's labels alone. The samples represent all values that the requirements distinguish.
func (r Rule) covers(other Rule) bool {
	others := other.byKey()
	for key, requirements := range r.byKey() {
		more := func(set labels.Set) bool { return matchAll(others[key], set) && !matchAll(requirements, set) }
		if slices.ContainsFunc(samples(key, slices.Concat(requirements, others[key])), more) {
			return false
		}
	}
	return true
}

func (r Rule) byKey() map[string]labels.Requirements {
	byKey := map[string]labels.Requirements{}
	for _, requirement := range r.requirements {
		byKey[requirement.Key()] = append(byKey[requirement.Key()], requirement)
	}
	return byKey
}

func matchAll(requirements labels.Requirements, set labels.Set) bool {
	return !slices.ContainsFunc(requirements, func(r labels.Requirement) bool { return !r.Matches(set) })
}

// samples returns sets with one label of that name, or none, which represent all values that the
// requirements distinguish: no label; each named value; for numbers, the numbers before and after
// it and another spelling of the same number; and another text.
func samples(key string, requirements labels.Requirements) []labels.Set {
	values := map[string]bool{"": true, "no-such-value": true}
	for _, requirement := range requirements {
		for _, value := range requirement.ValuesUnsorted() {
			values[value] = true
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				continue
			}
			values["0"+value] = true
			for _, near := range []int64{n - 1, n, n + 1} {
				if near >= 0 { // No label begins with a minus sign. The number after the last wraps to one.
					values[strconv.FormatInt(near, 10)] = true
					values["0"+strconv.FormatInt(near, 10)] = true
				}
			}
		}
	}
	for other := "no-such-value"; ; other += "-x" { // Find a value that is not named.
		values[other] = true
		if !slices.ContainsFunc(requirements, func(r labels.Requirement) bool { return r.Values().Has(other) }) {
			break
		}
	}
	sets := []labels.Set{{}}
	for _, value := range slices.Sorted(maps.Keys(values)) {
		sets = append(sets, labels.Set{key: value})
	}
	return sets
}

// checkLayout reports the rule's MIG layout if the rule's profile cannot have it.
func (r Rule) checkLayout(number int, profile Config) {
	if r.Layout == "" {
		return
	}
	_, err := profile.SelectedFrom("", "", nil).SelectRuleMIG(r.Layout)
	if err != nil {
		r.layout.problemHere(fmt.Sprintf("rule %d: profile %s: %s", number, r.Profile, err))
	}
}

// SelectRuleMIG is SelectMIG for a rule's layout. It is an error if the layout would have no
// effect.
func (s SelectedProfile) SelectRuleMIG(name string) (SelectedProfile, error) {
	if name != "" && !s.Profile.MIG.Manage && s.Profile.MIG.LeftTo == "" {
		return s, fmt.Errorf("%w %s: the profile does not have mig.manage: true, so Virgate makes no MIG layout",
			ErrMIGLayout, quote(name))
	}
	return s.SelectMIG(name)
}

// Choice is why a profile is the node's. The zero Choice gives no reason, as for a profile in a
// file.
type Choice struct {
	// By is the reason, for people: "rule 2 of ConfigMap gpu/profiles", "label nvidia.com/device-plugin.config".
	By string `json:"by,omitempty"`
	// Rule is the number of the rule, counted from 1; 0 if no rule chose the profile.
	Rule int `json:"rule,omitempty"`
	// Rules is the Generation of the rules beside the profiles; empty if there are none.
	Rules string `json:"rules,omitempty"`
	// ByInventory is true if the rules use labels of the node's GPUs. AwaitsGPUs is true if a rule
	// may choose another profile once the GPUs are known.
	ByInventory bool `json:"-"`
	AwaitsGPUs  bool `json:"-"`
}
